"""A task set that cannot be served: a part of its tasks is not serialised."""

import verifiers.v1 as vf
from pydantic import Field


class SecretData(vf.TaskData):
    key: str = Field("", exclude=True)


class SecretTask(vf.Task[SecretData]):
    pass


class SecretWords(vf.Taskset[SecretTask, vf.TasksetConfig]):
    def load(self) -> list[SecretTask]:
        return []


__all__ = ["SecretWords"]

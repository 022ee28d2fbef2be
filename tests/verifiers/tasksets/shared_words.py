"""Words beside a tool server that all its rollouts share."""

from typing import Any

import verifiers.v1 as vf


class Stamp(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "stamp"

    @vf.tool
    def put(self, message: str) -> str:
        """Put the stamp under a message."""
        return f"{message} [stamp]"


class SharedConfig(vf.TasksetConfig):
    tasks: int = 3
    stamp: vf.ToolsetConfig = vf.ToolsetConfig()


class SharedWords(vf.Taskset[vf.Task, SharedConfig]):
    @classmethod
    def toolsets(cls, config: SharedConfig) -> list[vf.Toolset[Any]]:
        return [Stamp(config.stamp)]

    def load(self) -> list[vf.Task]:
        words = [f"word{number}" for number in range(self.config.tasks)]
        return [vf.Task(vf.TaskData(name=word, prompt=f"say {word}"), self.config.task) for word in words]


__all__ = ["SharedWords"]


if __name__ == "__main__":
    Stamp.run()

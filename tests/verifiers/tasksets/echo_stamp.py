"""A tool server that stamps what it is given: the reward is 1 only if the tool was reached."""

import verifiers.v1 as vf

STAMP = "stamp-7f3"


class Stamp(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "stamp"

    @vf.tool
    def put(self, message: str) -> str:
        """Put the stamp under a message."""
        return f"{message} [{STAMP}]"


class StampTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class StampTask(vf.Task[vf.TaskData, vf.State, StampTaskConfig]):
    @classmethod
    def toolsets(cls, config: StampTaskConfig) -> list[vf.Toolset]:
        return [Stamp(config.tools)]

    @vf.reward
    async def stamped(self, trace: vf.Trace) -> float:
        return float(any(STAMP in str(message.content) for message in trace.tool_messages))


class StampsConfig(vf.TasksetConfig):
    task: StampTaskConfig = StampTaskConfig()
    tasks: int = 2


class Stamps(vf.Taskset[StampTask, StampsConfig]):
    def load(self) -> list[StampTask]:
        return [
            StampTask(
                vf.TaskData(name=f"task{number}", prompt=f'!call stamp_put {{"message": "task{number}"}}'),
                self.config.task,
            )
            for number in range(self.config.tasks)
        ]


__all__ = ["Stamps"]


if __name__ == "__main__":
    Stamp.run()

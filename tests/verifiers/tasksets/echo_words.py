"""One turn: say a word. With `!call` in the prompt the `bash` harness makes it two."""

import verifiers.v1 as vf


class WordTask(vf.Task):
    @vf.reward
    async def said(self, trace: vf.Trace) -> float:
        return float(self.data.name in (trace.nodes[-1].message.content or ""))


class WordsConfig(vf.TasksetConfig):
    prompt: str = "say {word}"
    tasks: int = 3


class Words(vf.Taskset[WordTask, WordsConfig]):
    def load(self) -> list[WordTask]:
        words = [f"word{number}" for number in range(self.config.tasks)]
        return [
            WordTask(vf.TaskData(name=word, prompt=self.config.prompt.replace("{word}", word)), self.config.task)
            for word in words
        ]


__all__ = ["Words"]

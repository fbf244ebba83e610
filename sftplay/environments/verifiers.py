"""Environments of the package verifiers (0.4, its interface v1): their `run` goes on from turn to turn of a completion.

The row's column `task` is the number of a task, whose prompt is added to the row's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any


def make(*, seat: str = "agent", **config: Any) -> Verifiers:
    """Make an environment by verifiers' own config, as `taskset={"id": "my_game"}`, for a model that plays the agent
    `seat`. Raise ValueError for one that needs what is not offered."""
    import verifiers.v1 as vf

    env = vf.load_environment(vf.resolve_env_config(config))
    kind, settings = env.taskset.task_type(), env.taskset.config
    if kind.NEEDS_CONTAINER or env.taskset.toolsets(settings) or kind.toolsets(settings.task):
        raise ValueError("tools by MCP and tasks that need a container are not offered")
    return Verifiers(env, seat, vf=vf)


class Verifiers:
    """An environment; as an agent of it, by `run` and `interaction`, it asks the model."""

    def __init__(self, env: Any, seat: str, *, vf: Any) -> None:
        self._env, self._seat, self._vf = env, seat, vf

    def reset(self, row: dict[str, Any]) -> str | None:
        self._loop = asyncio.new_event_loop()
        self._said = self._loop.create_future()
        self._over = self._loop.create_task(self._play(next(iter(self._env.taskset.skip(int(row["task"]))))))
        return self.step("")[0]

    def step(self, text: str) -> tuple[str | None, float | None, bool]:
        self._said.set_result(text)
        self._asked, self._said = self._loop.create_future(), self._loop.create_future()
        self._loop.run_until_complete(asyncio.wait([self._over, self._asked], return_when=asyncio.FIRST_COMPLETED))
        return (None, self._over.result(), True) if self._over.done() else (self._asked.result(), None, False)

    def close(self) -> None:
        self._loop.close()

    async def _play(self, task: Any) -> float:
        self._episode = self._vf.Episode(task=self._vf.TraceTask(type=type(task).__name__, data=task.data), ok=True)
        await self._env.run(task, SimpleNamespace(**{self._seat: self}))
        await self._env.finalize(task, self._episode)
        return float(sum(trace.reward for trace in self._episode.traces))

    async def run(self, task: Any) -> Any:
        async with self.interaction(task) as played:
            return await played.turn() and played.trace

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[Any]:
        vf = self._vf
        trace = vf.Trace(task=self._episode.task, agent=vf.AgentInfo(config=vf.AgentConfig(), name=self._seat))
        waiting = [vf.SystemMessage(content=task.data.system_prompt)] if task.data.system_prompt else []

        async def turn(message: Any = None) -> Any:
            said = task.data.prompt if message is None else message
            waiting.extend([vf.UserMessage(content=said)] if isinstance(said, str) else said)
            self._asked.set_result("\n\n".join(str(one.content) for one in waiting))
            reply = vf.AssistantMessage(content=await self._said)
            for one in [*waiting, reply]:
                last = len(trace.nodes) - 1 if trace.nodes else None
                trace.nodes.append(vf.MessageNode(parent=last, message=one, sampled=one is reply))
            waiting.clear()
            return vf.Segment(messages=[reply])

        await task.setup(trace, None)
        yield SimpleNamespace(turn=turn, trace=trace)
        await task.finalize(trace, None)
        await task.score(trace)
        self._episode.traces.append(trace)

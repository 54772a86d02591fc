"""What each of two processes runs in `test_several_processes.py`: it ends with code 3 if all is as it should be."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import tempfile
import threading
import types

import numpy as np

from jaxrl_llm import processes
from jaxrl_llm.config import RewardConfig, RewardRunnerConfig
from jaxrl_llm.errors import RunStopped, UserError
from jaxrl_llm.launch.joining import find, join, leave


def raised(work) -> tuple[str, str]:
    try:
        work()
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, str(error)
    return "", ""


def fail(error: Exception, where: int) -> None:
    with processes.agreement():
        if processes.index() == where:
            raise error


class Listing:
    """In place of orbax's manager: the checkpoints that a process knows of, and those that it would find by now."""

    def __init__(self, known: list[int], found: list[int]):
        self.known, self.found = known, found

    def all_steps(self) -> list[int]:
        return self.known

    def latest_step(self) -> int | None:
        return max(self.known, default=None)

    def reload(self) -> None:
        self.known = self.found


def which_checkpoints(me: int) -> None:
    """Processes that see different files: one error for all, or what process 0 has seen. Not a wait of one for the
    other."""
    from jaxrl_llm.checkpoint import Checkpoints, holds_checkpoints
    from jaxrl_llm.config import CheckpointConfig

    with tempfile.TemporaryDirectory() as own:
        folder = pathlib.Path(own)
        assert not holds_checkpoints(folder)
        if me == 0:
            (folder / "checkpoints").mkdir()
        name, text = raised(lambda: holds_checkpoints(folder))
        assert name == "UserError" and "of 2 processes, 1 can't see these checkpoints" in text

        checkpoints = object.__new__(Checkpoints)
        checkpoints.directory = folder
        checkpoints._manager = Listing([1, 2] if me == 0 else [1], [1, 2])
        assert checkpoints.newest() == 2 and checkpoints.complete(None) == 2
        checkpoints._manager = Listing([1, 2], []) if me == 0 else Listing([1], [1])
        name, text = raised(lambda: checkpoints.complete(None))
        assert name == "UserError" and "no complete checkpoint of step 2 there; complete ones: [1]." in text
        checkpoints._manager = Listing([], []) if me == 0 else Listing([1], [1])
        assert checkpoints.newest() is None and checkpoints.read_host() == {}

        if me == 0:  # which alone makes the folder
            (folder / "run").touch()
        name, text = raised(lambda: Checkpoints(folder / "run", CheckpointConfig()))
        assert name == "UserError" and "can't be made (Not a directory)" in text


def which_reward_model(me: int) -> None:
    """One process alone can't load it: an error on all, not a wait for it in the first rollout."""
    from jaxrl_llm import rollout
    from jaxrl_llm.config import RewardModelConfig

    def load(*_, **__):
        if me == 1:
            raise UserError("no such model")

    rollout.ModelScorer = load
    settings = types.SimpleNamespace(reward_model=RewardModelConfig())
    groups = types.SimpleNamespace(mesh=lambda name: None)
    run = types.SimpleNamespace(config=settings, dtype=None, groups=groups)
    expected = ("UserError", "no such model") if me == 1 else ("UserError", "Process 1: no such model")
    assert raised(lambda: rollout.Rollout.reward_model.func(run)) == expected


def what_crosses(me: int) -> None:
    """Each process has a part of both blocks. Arrays of one come to the other, whatever splits them before and after,
    each byte once, and what both processes have does not go from one to the other. Again, nothing compiles.

    Caught: pieces that arrive at another device's place, or in another order; senders of the other process; a round for
    each piece; programs made anew for each call; a block of one process's devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxrl_llm import config as configs
    from jaxrl_llm import crossing
    from jaxrl_llm.device_groups import DeviceGroups
    from jaxrl_llm.observability.timing import CompileCounter

    asked = configs.default_config("grpo").to_dict()
    asked["placement"]["generation"].update(fsdp=2, tensor=2)
    asked["model"]["path"], asked["data"]["train"] = "builtin:tiny_addition", "builtin:addition/train"
    asked["rewards"] = {"exact": {"function": "exact_match"}}
    groups = DeviceGroups.of(configs.with_mesh(configs.resolve(asked), 6))
    source, target = groups.policy, groups.generation
    assert target is not None
    devices = np.array(jax.devices()).reshape(2, 3)
    assert [*source.devices.flat] == [*devices[:, 0]] and [*target.devices.flat] == [*devices[:, 1:].flat]
    befores = ((), ("fsdp",), (None, "fsdp"))
    afters = ((), (("tensor", "fsdp"),), (None, "fsdp"), ("fsdp", "tensor"))
    sources = [NamedSharding(source, PartitionSpec(*spec)) for spec in befores]
    targets = [NamedSharding(target, PartitionSpec(*spec)) for spec in afters]
    pairs = [(one, other) for one in sources for other in targets]
    value = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)
    arrays = [processes.put(value, one) for one, _ in pairs] + [processes.put(np.array(3, jnp.bfloat16), sources[0])]
    wanted = [*(other for _, other in pairs), targets[0]]
    moved = crossing.cross(arrays, wanted)
    with CompileCounter() as compiles:
        again = crossing.cross(arrays, wanted)
    assert compiles.count == 0
    for other, *both in zip(wanted, moved, again, strict=True):
        for one in both:
            assert one.sharding == other and len(one.addressable_shards) == 2
            for shard in one.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index] if one.ndim else 3)
    route = crossing._route(value.shape, sources[0], targets[0])
    ends = [
        (one.process_index, other.process_index) for (_, one), other in zip(route.senders, route.receivers, strict=True)
    ]
    assert ends == [(0, 0), (0, 0), (1, 1), (1, 1)] and len(route.exchange.rounds) == 2


def main() -> None:
    join(find(os.environ), heartbeat_s=10, join_timeout_s=60)
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jaxrl_llm.rewards.pool import RewardRunner

    me = processes.index()
    assert (processes.count(), me, len(jax.devices())) == (2, int(os.environ["JAXRL_PROCESS"]), 6)

    parts = processes.exchange(lambda: list(processes.share(5)))
    assert parts == [[0, 1], [2, 3, 4]]
    assert processes.exchange(lambda: "x" * (5000 * me + 1)) == ["x", "x" * 5001]
    assert processes.from_first(me) == 0 and any(processes.exchange(lambda: me == 1))

    expected = ("UserError", "no such file") if me == 1 else ("UserError", "Process 1: no such file")
    assert raised(lambda: fail(UserError("no such file"), where=1)) == expected
    expected = ("KeyError", "'row'") if me == 0 else ("RuntimeError", "Process 0: KeyError: 'row'")
    assert raised(lambda: fail(KeyError("row"), where=0)) == expected
    name, text = raised(lambda: processes.require_equal({"the configuration": me, "the code": 1}))
    assert name == "UserError" and "Process 1 of 2 differs from process 0 in the configuration." in text

    # What would be another value where it arrives is refused, on all.
    plain = {"exact": 0.1 + 0.2, "none": [None, True, float("inf")], "text": "\ud800 \u00e9"}
    assert processes.exchange(lambda: {**plain, "own": me}) == [{**plain, "own": 0}, {**plain, "own": 1}]
    assert np.isnan(processes.exchange(lambda: float("nan"))).all()
    for value in ((1, 2), {1: 2}, np.float32(1), [b"x"]):
        name, text = raised(lambda value=value: processes.exchange(lambda: value if me else 0))
        assert (name, "can't be sent" in text) == (("RuntimeError", "TypeError")[me], True)

    which_checkpoints(me)

    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec("d"))
    placed = processes.put(np.arange(6, dtype=np.int32), sharding)
    assert [shard.data.tolist() for shard in placed.addressable_shards] == [[[0], [1], [2]], [[3], [4], [5]]][me]
    what_crosses(me)

    def reward(prompt, completion, answer):
        if completion == "broken":
            raise ValueError(f"in process {os.environ['JAXRL_PROCESS']}")
        return int(os.environ["JAXRL_PROCESS"]) + 10 * len(completion)

    settings = RewardRunnerConfig(num_workers=1, failure_score=-1.0)
    with RewardRunner({"r": RewardConfig()}, settings, extra={"r": reward}) as runner:
        scored = runner.score([""] * 4, ["a", "broken", "", "ccc"], [None] * 4, [{}] * 4)
        assert scored.total.tolist() == [10, -1, 1, 31] and scored.failures == 1  # two samples each
        assert "in process 0" in scored.failure_messages[0]
        # Every score of process 0 failed, but not every score.
        assert runner.score([""] * 4, ["broken", "broken", "", ""], [None] * 4, [{}] * 4).failures == 2
        try:
            runner.score([""] * 2, ["broken"] * 2, [None] * 2, [{}] * 2)
        except RunStopped as error:
            assert "failed (2 calls" in str(error)
        else:
            raise AssertionError("nothing could be scored, and the run goes on")

    which_reward_model(me)

    if me == 1:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()  # while it waits for the other one
        leave(3)  # an error of this one alone
    processes.exchange(lambda: False)  # never answered


if __name__ == "__main__":
    try:
        main()
    except AssertionError:
        import traceback

        traceback.print_exc()
        leave(1)
    sys.exit(1)

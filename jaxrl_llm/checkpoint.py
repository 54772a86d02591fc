"""Checkpoints: everything that defines the next step, written in the background and named only when complete.

A checkpoint ``<workdir>/checkpoints/<step>/`` holds two items: ``state`` (parameters and optimizer state of every
role, with the dtypes they have in the run) and ``host`` (JSON: data position, the algorithm's memory, best metric,
versions, sums of the arrays' bits). Randomness needs no state: it follows from (seed, step, prompt, sample, position).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as preservation

from jaxrl_llm import processes
from jaxrl_llm.array_sums import Sums, array_sums, changed
from jaxrl_llm.config import CheckpointConfig
from jaxrl_llm.errors import RunStopped, UserError


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint read back: `step` steps are done; `state` is where its template says, `host` plain JSON values."""

    step: int
    state: Any
    host: dict[str, Any]


FOLDER = "checkpoints"

_SUMS = "sums"


def holds_checkpoints(workdir: pathlib.Path | str) -> bool:
    """Whether a run has saved something in ``workdir``; the same answer on all processes.

    Raises:
      UserError: some processes see its checkpoints and others don't.
    """
    folder = pathlib.Path(workdir, FOLDER).absolute()
    found = processes.exchange(folder.is_dir)
    if any(found) and not all(found):
        blind = ", ".join(str(process) for process, seen in enumerate(found) if not seen)
        raise UserError(
            f"{folder}: of {len(found)} processes, {blind} can't see these checkpoints. Each reads its part of them: "
            "choose a folder on a file system that all share."
        )
    return all(found)


class Checkpoints:
    """The checkpoints of one run. Keeps the last `keep` and, on top of them, the one with the best metric.

    Which ones there are, process 0 says: another one may have looked a moment earlier or later.

    Args:
      read_only: creates, deletes and cleans nothing.

    Raises:
      UserError: their folder can't be made or written to.
    """

    def __init__(self, workdir: pathlib.Path, config: CheckpointConfig, *, read_only: bool = False):
        self.config = config
        self.directory = (workdir / FOLDER).absolute()
        if not read_only:
            with processes.agreement():  # orbax would fail on process 0 alone, and late or with a traceback
                self._make_folder()
        policies: list[preservation.PreservationPolicy] = [preservation.LatestN(config.keep)]
        if config.best_metric:
            policies.append(
                preservation.BestN(
                    get_metric_fn=lambda metrics: metrics[config.best_metric],
                    n=1,
                    keep_checkpoints_without_metrics=False,
                )
            )
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=preservation.AnyPreservationPolicy(policies),
                cleanup_tmp_directories=not read_only,
                create=not read_only,
                read_only=read_only,
            ),
            item_names=("state", "host"),
        )

    def _make_folder(self) -> None:
        try:
            if processes.is_first():
                self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{self.directory}: this folder for the run's checkpoints can't be made ({error.strerror}). Move away "
                "what is in its place, look at the rights to the work folder, or choose another --workdir."
            ) from error
        if self.directory.exists() and not os.access(self.directory, os.W_OK | os.X_OK):
            raise UserError(
                f"{self.directory}: checkpoints can't be written here, for want of rights to this folder. Set them, or "
                "choose another --workdir."
            )

    def save(self, step: int, state: Any, host: dict[str, Any], metrics: dict[str, float]) -> None:
        """Starts writing. Device buffers are copied before it returns, so the next step may donate them; arrays in the
        host's memory are written from where they are.

        Args:
          step: how many steps are done.
          metrics: of this step; the best metric is looked up here.

        Raises:
          RunStopped: this save, or the one before it in the background, could not be written.
        """
        if processes.from_first(step in self._manager.all_steps()):
            return  # the same step is the same state
        metric = self.config.best_metric
        # One may be measured (seconds, bytes), and all processes must keep the same checkpoints.
        best = {metric: processes.from_first(float(metrics[metric]))} if metric in metrics else None
        host = {**host, _SUMS: array_sums(state)}
        with self._written():
            self._manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host)),
                metrics=best,
                force=True,
            )

    def latest_step(self) -> int | None:
        """Steps done in the newest complete checkpoint that this process knows of; None if there is none."""
        return self._manager.latest_step()

    def newest(self) -> int | None:
        """`latest_step` of process 0, on all."""
        return processes.from_first(self.latest_step())

    def restore(self, template: Any, step: int | None = None) -> Restored:
        """Reads a checkpoint into the shapes, dtypes, shardings and memories of `template`, and nowhere else.

        Args:
          template: arrays or `jax.ShapeDtypeStruct`s with shardings; another mesh than at saving is fine.
          step: which one; the newest by default.

        Raises:
          UserError: there is no such checkpoint, or it does not fit the template.
        """
        step = self.complete(step)
        abstract = jax.tree.map(_abstract, template)
        with self._explained(step):
            restored = self._manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract), host=ocp.args.JsonRestore())
            )
            host = restored["host"]
            _check_sums(host.pop(_SUMS, {}), restored["state"])
        return Restored(step, restored["state"], host)

    def read_host(self) -> dict[str, Any]:
        """The JSON values of the newest checkpoint; empty where there is none.

        Raises:
          UserError: see `restore`.
        """
        if self.newest() is None:
            return {}
        step = self.complete(None)
        host = self._host(step)
        host.pop(_SUMS, None)
        return host

    def _host(self, step: int) -> dict[str, Any]:
        with self._explained(step):
            return self._manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]

    def restore_params(self, role: str, template: Any, step: int | None = None) -> tuple[int, Any]:
        """Reads only the parameters of one role, into the shapes and shardings of `template`: for using a model
        without going on with its training.

        Returns:
          How many steps are done, and the parameters.

        Raises:
          UserError: see `restore`.
        """
        step = self.complete(step)
        item = {role: {"params": jax.tree.map(_abstract, template)}}
        arguments = ocp.checkpoint_utils.construct_restore_args(item)
        with self._explained(step), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            restored = reader.restore(
                self.directory / str(step) / "state",
                args=ocp.args.PyTreeRestore(item=item, restore_args=arguments, partial_restore=True),
            )
            found = restored.get(role, {}).get("params", {})
            if jax.tree.map(_is_array, found) != jax.tree.map(
                lambda _: True, template
            ):  # the partial one never complains
                raise ValueError(f"it holds other parameters of {role!r}, or none.")
            place = f"[{role!r}].params"  # of the role in `RoleState`s by name
            saved = self._host(step).get(_SUMS, {})
            _check_sums({key.removeprefix(place): one for key, one in saved.items() if key.startswith(place)}, found)
        return step, found

    def complete(self, step: int | None) -> int:
        """`step`, or the newest, for all processes.

        Raises:
          UserError: there is no complete checkpoint of it.
        """
        wanted = self.newest() if step is None else step
        with processes.agreement():
            if wanted not in self._manager.all_steps():
                self._manager.reload()  # process 0 has looked later
            complete = sorted(self._manager.all_steps())
            if wanted is None or wanted not in complete:
                shared = " All processes must see the same files." if processes.count() > 1 else ""
                raise UserError(
                    f"{self.directory}: no complete checkpoint{'' if wanted is None else f' of step {wanted}'} there; "
                    f"complete ones: {complete or 'none'}.{shared}"
                )
        return wanted

    @contextlib.contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # tensorstore tells a damaged file with errors of its own
            others = [other for other in sorted(self._manager.all_steps()) if other != step]
            older = f"delete its folder to go on from another ({', '.join(map(str, others))})" if others else ""
            raise UserError(
                f"{self.directory / str(step)}: this checkpoint does not fit the run (another model, algorithm or "
                f"optimizer, or a damaged file): {str(error).partition(chr(10))[0]} Use another --workdir, or the "
                f"configuration saved there (config.json){'; if it is damaged, ' + older if older else ''}."
            ) from error

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        """Orbax raises the error of a background save where the next one starts, or where it is waited for."""
        try:
            yield
        except (ValueError, OSError) as error:  # tensorstore's errors are ValueErrors
            complete = self.latest_step()
            kept = "none is complete" if complete is None else f"the newest complete one is of step {complete}"
            raise RunStopped(
                f"A checkpoint can't be written to {self.directory}: {str(error).partition(chr(10))[0]} Nothing of it "
                f"counts; {kept}. Make room on the disk (checkpoint.keep = {self.config.keep} are kept) or look at the "
                "rights to the folder, then run the same command again."
            ) from error

    def wait(self) -> None:
        """Blocks until every started save is complete.

        Raises:
          RunStopped: one could not be written.
        """
        with self._written():
            self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()


def _check_sums(saved: Sums, read: Any) -> None:
    """Raises ValueError where an array is not as it was saved; a checkpoint of an earlier version has no sums."""
    if damaged := changed(saved, array_sums(read)):
        raise ValueError(f"the bits of {damaged[0]} ({len(damaged)} arrays in all) are not those that were saved.")


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

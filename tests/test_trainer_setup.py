"""A trainer that can't be made leaves nothing open."""

import jax
import pytest

from jaxrl_llm import roles, rollout
from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.errors import UserError
from jaxrl_llm.trainer import Trainer
from tests.test_trainer import exact, make_config, rows_file

__all__ = ["rows_file"]


@pytest.mark.parametrize(
    ("module", "name", "changes"),
    [(roles, "load_model", {}), (rollout, "ModelScorer", {"reward_model.path": "somewhere"})],
    ids=["model", "reward model"],
)
def test_the_folder_is_free_after_a_failure(rows_file, tmp_path, monkeypatch, module, name, changes):
    """The error is kept, as a notebook keeps it, and with it the trainer. Caught: the folder's lock, or orbax's
    threads, held until then."""
    options = {"rewards": {"exact": exact}, "devices": jax.devices()[:1]}
    closed = []
    close = Checkpoints.close
    monkeypatch.setattr(Checkpoints, "close", lambda checkpoints: (closed.append(1), close(checkpoints)))

    def fail(*_, **__):
        raise UserError("no such weights")

    with monkeypatch.context() as broken:
        broken.setattr(module, name, fail)
        with pytest.raises(UserError, match="no such weights") as error:
            Trainer(make_config(rows_file, **changes), tmp_path / "run", **options)
    assert closed == [1] and error.tb is not None
    Trainer(make_config(rows_file), tmp_path / "run", **options).close()

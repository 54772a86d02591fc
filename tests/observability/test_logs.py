"""Our messages are shown, those of others only from warnings on."""

from __future__ import annotations

import io
import logging

import pytest

from jaxrl_llm.observability.logs import show_logs


@pytest.fixture(autouse=True)
def restored():
    root, names = logging.getLogger(), ("", "jaxrl_llm", "jaxrl_kernels", "absl")
    handlers, levels = root.handlers[:], {name: logging.getLogger(name).level for name in names}
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_messages_of_the_package_only(capsys):
    """Caught: the level set on the root logger, which printed a page of orbax's lines per checkpoint."""
    show_logs("info")
    logging.getLogger("jaxrl_llm.trainer").info("resumed")
    logging.getLogger("jaxrl_kernels.choice").info("row attention")
    logging.getLogger("jaxrl_llm.trainer").debug("hidden")
    logging.getLogger("absl").info("hidden")
    logging.getLogger("other").info("hidden")
    logging.getLogger("other").warning("careful")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:1] == ["INFO jaxrl_llm.trainer: resumed"]
    assert lines[1:] == ["INFO jaxrl_kernels.choice: row attention", "WARNING other: careful"]


def test_a_replaced_stderr_is_used(monkeypatch):
    """What a live progress bar does. Caught: a handler that keeps the first stderr."""
    show_logs("info")
    replaced = io.StringIO()
    monkeypatch.setattr("sys.stderr", replaced)
    logging.getLogger("jaxrl_llm").info("above the bar")
    assert "above the bar" in replaced.getvalue()

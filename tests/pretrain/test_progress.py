"""What a person sees: lines into a file, a bar on a terminal, nothing from other ranks."""

from __future__ import annotations

import io
import sys

from fp4_plugin.pretrain.progress import Progress
from fp4_plugin.pretrain.training import StepRecord


class Terminal(io.StringIO):
    def isatty(self):
        return True


def _run(visible=True):
    progress = Progress("paper", 25, 10, visible=visible)
    for step in range(1, 26):
        progress.step(StepRecord(step, 2.5, 1e-3, 0.5))
    progress.held_out(25, 2.25)
    progress.close()


def test_without_a_terminal_there_is_a_line_every_interval(capsys):
    _run()
    captured = capsys.readouterr()
    steps = [line.split()[2] for line in captured.out.splitlines() if "step " in line][:-1]
    assert steps == ["1/25", "10/25", "20/25", "25/25"]
    assert "held-out loss 2.2500 after step 25" in captured.out
    assert captured.err == ""


def test_a_resumed_run_begins_with_a_line(capsys):
    progress = Progress("paper", 25, 10, visible=True, steps_done=13)
    for step in range(14, 26):
        progress.step(StepRecord(step, 2.5, 1e-3, 0.5))
    steps = [line.split()[2] for line in capsys.readouterr().out.splitlines()]
    assert steps == ["14/25", "20/25", "25/25"]


def test_on_a_terminal_there_is_a_bar_and_no_lines(capsys, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    _run()
    assert capsys.readouterr().out == ""
    assert "25/25" in terminal.getvalue() and "loss 2.5000" in terminal.getvalue()
    assert "held-out loss 2.2500" in terminal.getvalue()


def test_other_ranks_are_silent(capsys, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    _run(visible=False)
    assert (capsys.readouterr().out, terminal.getvalue()) == ("", "")

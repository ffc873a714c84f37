"""Bindings to training frameworks; nothing below this package imports one."""

from __future__ import annotations

__all__: list[str] = []

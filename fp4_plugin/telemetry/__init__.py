"""The proof: what was asked for, what ran, and where the two differ."""

from __future__ import annotations

from fp4_plugin.telemetry.manifest import LayerReport, build_manifest, report_layers

__all__ = ["LayerReport", "build_manifest", "report_layers"]

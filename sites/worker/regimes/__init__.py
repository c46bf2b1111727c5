"""Regimes: when what sites have learnt crosses, and when it counts."""

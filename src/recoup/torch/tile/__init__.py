"""Tiling: token-wise regions of an unmodified model run in pieces, recomputed in the backward, so that transients are one piece's."""

"""End-to-end A/B: the prefill of a stack of sparse-attention layers, run with two sides in turn.

``dims`` holds the sizes, ``cache`` the paged key cache, ``stack`` the layers, ``prompt`` the needles, ``clock`` the
time by phase, ``checks`` what is compared with the reference, ``run`` the A B A B, ``report`` its tables. ``traces``
sums kernel traces, of anyone.
"""

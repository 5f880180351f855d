"""What flatparam does on the accelerator of this machine, in one run of less than ten minutes.

Read ``main.py`` first. ``place.py`` starts ranks on devices. ``losses.py``, ``steps.py``, ``overlap.py``,
``memory.py``, ``host.py`` and ``capture.py`` measure one thing each; ``timeline.py`` and ``formula.py`` are the
arithmetic of two of them. ``results.py`` and ``page.py`` write what was found.
"""

"""The benchmark: what a training step costs, ours and everybody's, in one run.

Read ``main.py`` first. ``workloads.py`` says what is trained, ``contenders.py`` and ``peers.py`` by whom, ``rounds.py``
takes the times, ``counts.py`` and ``memory.py`` what is exact, ``instructions.py`` and ``growth.py`` the host's part,
``page.py`` makes docs/performance.md of it.
"""

"""The main job in parts: text, model, sharding, training, checkpoints, report.

Read ``session.py`` first: it is what one rank does from beginning to end. ``options.py``, ``launch.py``,
``corpus.py``, ``plan.py`` and ``stop.py`` do not import torch, so that the launching process starts at
once and can refuse bad input before any rank exists.
"""

"""Train a byte-level GPT with flatparam on two ranks: the repository's main job.

    python tools/train.py                                    # about 1 M parameters, two ranks, 2-3 minutes
    python tools/train.py --size tiny --steps 100 --fresh    # a quick look
    python tools/train.py --data my-notes/ --out runs/notes  # your own text
    torchrun --nproc-per-node 2 tools/train.py               # the same, launched by you

``--help`` lists every option. The parts are in ``tools/gpt``, one noun per file; ``gpt/session.py`` tells the story.
"""

import sys
from importlib.util import find_spec

REQUIRED = ("attrs", "torch", "flatparam")


def main() -> int:
    """Run the job and return the process's exit status."""
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if missing:
        print(
            f"train.py: error: {' and '.join(missing)} not installed in {sys.executable}. "
            "The first command in README.md sets up an environment that has everything.",
            file=sys.stderr,
        )
        return 2
    from gpt.main import run

    return run(sys.argv[1:], script=__file__)


if __name__ == "__main__":
    sys.exit(main())

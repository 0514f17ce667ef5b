"""`torchrun --nproc-per-node N -m draftsmith.train recipe.toml`: the verb `train`, on every process."""

import sys

from draftsmith.cli.main import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])

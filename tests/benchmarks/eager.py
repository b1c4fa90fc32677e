"""transformers' side: its own modules, attention (SDPA) and cache in fp32, the tree's mask given as
it takes one."""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from benchmarks.checkpoints import tree_mask
from benchmarks.child import obey, timed
from benchmarks.models import draw_tree, token_row
from dovetail.workers.models.parity.following import cache_name


def prepare(folder: Path, context: int, threads: int) -> tuple[Any, Any]:
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    ).eval()
    cache = DynamicCache(config=model.config)
    vocabulary, name = model.config.vocab_size, cache_name(model)

    model(torch.tensor([token_row(context, vocabulary)]), **{name: cache}, logits_to_keep=1)

    def verify(rows: int) -> Mapping[str, Any]:
        tree = draw_tree(rows - 1)

        def work() -> None:
            mask = torch.zeros(1, 1, rows, context + rows)
            mask[0, 0, :, context:].masked_fill_(~tree_mask(tree), -math.inf)
            positions = torch.tensor([[context + depth for depth in (0, *tree.depths)]])
            model(
                torch.tensor([token_row(rows, vocabulary)]),
                attention_mask=mask,
                position_ids=positions,
                **{name: cache},
            )

        seconds = timed(work)
        cache.crop(-rows)
        return seconds

    def prefill(rows: int) -> Mapping[str, Any]:
        fresh = DynamicCache(config=model.config)
        return timed(
            lambda: model(
                torch.tensor([token_row(rows, vocabulary)]), **{name: fresh}, logits_to_keep=1
            )
        )

    return {"engine": "transformers eager fp32"}, {"verify": verify, "prefill": prefill}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    obey(lambda: prepare(**vars(arguments)))


if __name__ == "__main__":
    main()

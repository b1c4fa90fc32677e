"""The oracle of log-likelihoods: transformers' own model, one text at a time."""

from collections.abc import Sequence
from pathlib import Path


def largest_difference(
    folder: Path, scores: Sequence[tuple[Sequence[int], Sequence[int], float]]
) -> float:
    """Return how far, in nats, the worst log-likelihood of (context, continuation, log-likelihood)
    is from that of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    ).eval()
    differences = []
    for context, continuation, told in scores:
        tokens = torch.tensor([[*context, *continuation]])
        with torch.inference_mode():
            logprobs = model(tokens).logits[0].double().log_softmax(-1)
        places = range(len(context) - 1, len(context) + len(continuation) - 1)
        expected = sum(
            logprobs[place, token].item() for place, token in zip(places, continuation, strict=True)
        )
        differences.append(abs(expected - told))
    return max(differences)

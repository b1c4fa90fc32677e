"""Speculative decoding on one page: grow a tree, verify it in one pass, walk it, commit.

This is the algorithm for one sequence in one process, with models as plain functions. The
coordinator and its workers do the same over messages and caches, with the functions called here;
tests compare them with this page. Rounds follow the Dovetail paper (section 3); with the policy
`dynamic` the tree is EAGLE-2's (section 4). A token is the argmax of processed logits plus Gumbel
noise that depends on the key and the position alone. Draft and target use the same noise, so the
draft predicts what the target will sample."""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.tree import ROOT, TokenTree
from dovetail.workers.speculation.acceptance import walk
from dovetail.workers.speculation.growth import GrowingTree, likeliest
from dovetail.workers.speculation.noise import gumbel_noise
from dovetail.workers.speculation.policies import open_policy
from dovetail.workers.speculation.policy import Policy
from dovetail.workers.speculation.proposal import Shape
from dovetail.workers.speculation.sampling import LookingBack, choose, process_logits

Model = Callable[[Sequence[int], Sequence[Sequence[int]]], Tensor]
"""A causal model: (tokens so far, N continuations of them) -> the logits [N, V] after each."""


class Chooser:
    """Chooses tokens: processes logits (penalties, temperature, top-k, top-p) and adds the noise of
    the position, so that the argmax is an exact sample (Gumbel-max), the same one for draft and
    target."""

    def __init__(self, prompt: Sequence[int], sampling: Sampling, key: bytes, size: int) -> None:
        """`key` seeds the noise; `size` is V."""
        self.sampling, self._key, self._size, self._length = sampling, key, size, len(prompt)
        self._looking_back = LookingBack(sampling, prompt, end=(), size=size)

    def process(
        self, logits: Tensor, paths: Sequence[Sequence[int]]
    ) -> tuple[Tensor, list[Tensor] | None]:
        """Return processed logits [N, V] after `paths`, and noise [V] for each."""
        z = process_logits(
            self._looking_back.process(logits[:, : self._size], paths), self.sampling
        )
        if self.sampling.temperature == 0.0:
            return z, None
        places = [self._length + len(path) for path in paths]
        return z, [gumbel_noise(self._key, place, self._size) for place in places]

    def choice(self, logits: Tensor, path: Sequence[int]) -> int:
        """Return the token after `path`, from logits [1, V]."""
        z, noise = self.process(logits, [path])
        return int(choose(z, None if noise is None else noise[0].unsqueeze(0))[0])

    def commit(self, tokens: Sequence[int]) -> None:
        """Note that the log has grown by `tokens`."""
        self._looking_back.extend(tokens)
        self._length += len(tokens)


def speculative_decode(
    prompt: Sequence[int],
    target: Model,
    draft: Model,
    *,
    tree: TreeSettings,
    sampling: Sampling,
    key: bytes,
    vocabulary_size: int,
) -> Iterator[list[int]]:
    """Yield the tokens of each round, without end: the accepted path of the draft's tree and the
    bonus, the target's own choice after it. The tokens are always those of the target alone; the
    draft only decides how many each round commits."""
    log, chooser = [*prompt], Chooser(prompt, sampling, key, vocabulary_size)
    policy, shape = open_policy(tree), Shape(tree.most_nodes, tree.most_levels, tree.width)
    while True:
        proposal = grow(log, draft, chooser, policy, shape)
        paths = [
            [proposal.tokens[node] for node in proposal.path(n)] for n in range(ROOT, len(proposal))
        ]
        logits = target(log, paths)  # one pass: row 0 is the root, row i + 1 is node i
        choices = {
            row: chooser.choice(logits[row : row + 1], path) for row, path in enumerate(paths)
        }
        accepted, bonus = walk(proposal, choices)
        tokens = [*(proposal.tokens[node] for node in accepted), bonus]
        log += tokens
        chooser.commit(tokens)
        yield tokens


def grow(
    log: Sequence[int], draft: Model, chooser: Chooser, policy: Policy, shape: Shape
) -> TokenTree:
    """Return the tree that a draft proposes after `log`. Each pass expands the policy's nodes by
    the tokens that the target would choose if its logits were the draft's."""
    tree = GrowingTree()
    for nodes in policy.passes(tree, shape):
        paths = [tree.path_tokens(node) for node in nodes.tolist()]
        z, noise = chooser.process(draft(log, paths), paths)
        if nodes[0] != ROOT:
            tree.give_rows(nodes)
        tree.add_children(nodes, *likeliest(z, shape.width, noise=noise))
    return tree.token_tree(policy.select(tree, shape))

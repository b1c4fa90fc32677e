"""Reports what will be sent over the network before a session begins: token ids, and for heads
hidden states; never weights.
"""

from dovetail.launch.console.terminal import counted
from dovetail.protocol.messages import Hello, Reported, WorkerState

NEVER = "no weights, no files"


def leaves_the_machine(address: str) -> bool:
    """True if messages to this address may go over a network."""
    return address.startswith("tcp://")


def of_worker(hello: Hello, address: str) -> str:
    """Describe what a worker with this Hello receives and sends."""
    reads, tokenizer = hello.reads, hello.tokenizer
    gets, sends = ["token ids of prompts and replies", "the settings of requests"], ["token ids"]
    if "target" in hello.roles:
        gets.append("proposed token ids")
        sends.append("their margins (log-probabilities if requested)")
        if hello.states is not None:
            sends.append(
                f"for a draft that reads them, hidden states of 2 x {hello.states.width} bytes "
                "a token and layer"
            )
    else:
        sends.append("their scores")
    if reads is not None:
        gets.append(f"hidden states of {reads.row_bytes} bytes a token")
    if tokenizer is not None:
        sends.append(f"its tokenizer of {counted(len(tokenizer.data), 'byte')} (once)")
    return (
        f"over {address}: it is sent {_listed(gets)}; it sends {_listed(sends)}; {NEVER}, no text"
    )


def of_request(address: str, state: Reported) -> str:
    """Describe what a client's request sends."""
    hops = [
        f"to the {'+'.join(worker.roles)} worker {worker.name} on {worker.host} "
        f"{_to_worker(worker)}"
        for worker in state.workers
        if not (worker.standby or worker.leaving)
    ]
    return "; ".join(
        (
            f"over {address}: the prompt as text goes there, text and token ids come back",
            *hops,
            NEVER,
        )
    )


def _to_worker(worker: WorkerState) -> str:
    return f"go token ids{f' and hidden states of {worker.feature_bytes} bytes a token' if worker.feature_bytes else ''}"  # noqa: E501


def _listed(parts: list[str]) -> str:
    return ", ".join(parts[:-1]) + f" and {parts[-1]}" if len(parts) > 1 else parts[0]

"""The entry point of the installed command, before any other import of ours."""

import signal


def main() -> None:
    """Import the command line and run it. Ctrl-C during the import ends this process by that
    signal, without a traceback; afterwards it is a `KeyboardInterrupt`, as usual."""
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:  # unless it is ignored, as under nohup or in the background of a script
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from dovetail.launch import cli

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()

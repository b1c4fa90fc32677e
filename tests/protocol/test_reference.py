"""The page of all messages is what the classes say."""

from support.wire_reference import PAGE, reference


def test_the_page_of_messages_is_made_from_their_classes() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), (
        "run: PYTHONPATH=tests python tests/support/wire_reference.py"
    )

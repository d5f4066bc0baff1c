"""docs/differences.md says what the cases and the tests of its rows assert."""

from . import differences_page


def test_the_page_has_a_row_for_each_difference_that_is_asserted():
    page = differences_page.PAGE.read_text()
    assert differences_page.with_tables(page) == page, (
        "write it again: cd tests && python -m parity.differences_page"
    )

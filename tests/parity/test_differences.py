"""docs/differences.md says what the cases assert."""

from . import differences_page


def test_the_page_has_a_row_for_each_difference_that_is_asserted():
    page = differences_page.PAGE.read_text()
    assert differences_page.with_table(page) == page, (
        "write it anew: cd tests && python -m parity.differences_page"
    )

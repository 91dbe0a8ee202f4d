import pytest

from tightfit.errors import BudgetError
from tightfit.units import check_budget, format_bytes, format_count, format_seconds, parse_budget, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("22GiB", 22 * 2**30),
        ("24GB", 24 * 10**9),
        ("512 MB", 512 * 10**6),
        ("1.5kib", 1536),
        ("7", 7),
        (7, 7),
        (".5mb", 500_000),
    ],
)
def test_amounts_are_read_in_decimal_and_binary_units(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["5 parsecs", "", "GiB", "-3GB", "1e3MB", True, None, 2.5, ["1GB"]])
def test_what_is_no_amount_is_refused_by_name(text):
    with pytest.raises(BudgetError, match=r"is not an amount of memory"):
        parse_bytes(text)


def test_a_budget_may_be_a_share_of_the_device_or_of_the_plain_peak():
    assert parse_budget("80%", device_bytes=1000) == 800
    assert parse_budget("0.5x", plain_peak_bytes=1000) == 500
    assert parse_budget("1GB") == 10**9


@pytest.mark.parametrize(("text", "unknown"), [("80%", "the device's memory"), ("0.5x", "the plain peak")])
def test_a_share_of_what_is_not_known_is_refused(text, unknown):
    with pytest.raises(BudgetError, match=unknown):
        parse_budget(text)


@pytest.mark.parametrize("text", [0, "0GB", "0x", -5])
def test_a_budget_is_above_zero(text):
    with pytest.raises(BudgetError, match="not above zero"):
        parse_budget(text, plain_peak_bytes=1000)


def test_more_than_the_whole_device_is_no_share_of_it():
    assert parse_budget("100%", device_bytes=1000) == 1000
    for text in ("1000%", "100.1%"):
        with pytest.raises(BudgetError, match=f"'{text}' is more than the device has"):
            check_budget(text)


@pytest.mark.parametrize("text", ["lots", "-1x", "0%", 0])
def test_what_is_no_budget_anywhere_is_known_without_a_device(text):
    with pytest.raises(BudgetError):
        check_budget(text)
    check_budget("0.001%")
    check_budget("3x")


def test_a_budget_in_unknown_units_names_all_forms():
    with pytest.raises(BudgetError, match=r"budget '3 bananas'.*GiB.*80%.*0\.5x"):
        parse_budget("3 bananas")


def test_bytes_and_seconds_are_written_for_people():
    assert format_bytes(22 * 2**30) == "22.00 GiB"
    assert format_bytes(512) == "512 B"
    assert format_bytes(3 * 2**40) == "3.00 TiB"
    assert format_seconds(0.0123) == "12.3 ms"
    assert format_seconds(2.5) == "2.50 s"
    assert format_seconds(25e-6) == "25.0 µs"


def test_counts_are_written_in_a_few_characters():
    written = [format_count(count) for count in (0, 512, 31_488, 6_534_000, 8_030_261_248, 405_853_388_800)]
    assert written == ["0", "512", "31.5K", "6.5M", "8.03B", "405.85B"]

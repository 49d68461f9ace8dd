"""Slurm's compressed lists, both ways."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_train.errors import RankError
from slurm_train.topology.hostlist import compress, compress_counts, expand, expand_counts


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("gpu[1,2]", ["gpu1", "gpu2"]),
        ("na,nb[001,003],nc", ["na", "nb001", "nb003", "nc"]),
        ("n[006,011]", ["n006", "n011"]),
        ("h[001,003-004,006]", ["h001", "h003", "h004", "h006"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("r[1,3]n[2]x,b", ["r1n2x", "r3n2x", "b"]),
        ("a-b.c[1-2].d", ["a-b.c1.d", "a-b.c2.d"]),
        (" n[1-2] ", ["n1", "n2"]),
        ("n2,n1,n2", ["n2", "n1", "n2"]),
    ],
)
def test_expand(text, names):
    assert expand(text) == names


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        ",",
        "n1,",
        ",n1",
        "n1,,n2",
        "n[1",
        "n1]",
        "n[]",
        "n[1-]",
        "n[-2]",
        "n[a-b]",
        "n[3-1]",
        "n[1-2-3]",
        "n[[1]]",
        "n 1",
        "n[1, 2]",
        "n[1-99999999999]",
        "n[1-1000][1-1000][1-1000]",
        "n" + "[1-900000]" * 1000,
        "n[1-" + "9" * 5000 + "]",
        "n[1" + "9" * 20 + "-2" + "9" * 20 + "]",
        "n[٣]",
    ],
)
def test_malformed_lists_are_refused(text):
    with pytest.raises(RankError):
        expand(text)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("1", [1]), ("4(x2)", [4, 4]), ("2(x3),1", [2, 2, 2, 1]), ("4(x2),1", [4, 4, 1]), ("5,1(x3)", [5, 1, 1, 1])],
)
def test_counts_both_ways(text, counts):
    assert expand_counts(text) == counts
    assert compress_counts(counts) == text


@pytest.mark.parametrize("text", ["", "x", "4(x)", "4(x2", "4x2", "-1", "1,,2", "4(x999999999)", "1(x2)(x3)", "٣"])
def test_malformed_counts_are_refused(text):
    with pytest.raises(RankError):
        expand_counts(text)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["n1", "n2", "n4"], "n[1-2,4]"),
        (["n001", "n002"], "n[001-002]"),
        (["n9", "n10"], "n[9-10]"),
        (["n09", "n10"], "n[09-10]"),
        (["n99", "n100"], "n[99-100]"),
        (["login"], "login"),
        (["n1", "m1", "n2"], "n1,m1,n2"),
        (["n2", "n1"], "n[2,1]"),
        (["n1-ib", "n2-ib"], "n1-ib,n2-ib"),
    ],
)
def test_compress(names, text):
    assert compress(names) == text
    assert expand(text) == names


@pytest.mark.parametrize("name", ["", "n[1]", "a,b", "a b", "n1\r", "n\x851"])
def test_what_is_no_name_is_not_compressed(name):
    with pytest.raises(RankError):
        compress([name])


def test_no_names_make_no_list():
    with pytest.raises(RankError):
        compress([])


NINES = "n" + "9" * 18


@pytest.mark.parametrize("names", [["n" + "9" * 5000, "n1"], ["n1", "n" + "9" * 5000], [NINES, "n1" + "0" * 18]])
def test_numbers_too_long_to_count_with_are_still_names(names):
    assert expand(compress(names)) == names


@given(st.lists(st.sampled_from(["n[1-2,4]", "m[008-011]", "login", "r2n[1,3]"]), min_size=1, unique=True))
def test_compress_is_the_inverse_of_expand_on_what_slurm_writes(parts):
    assert compress(expand(",".join(parts))) == ",".join(parts)


NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,5}[0-9]{0,4}(-ib)?|n[0-9]{1,30}", fullmatch=True)


@given(st.lists(NAMES, min_size=1, max_size=30))
def test_expand_is_the_inverse_of_compress(names):
    assert expand(compress(names)) == names


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=30))
def test_expand_counts_is_the_inverse_of_compress_counts(counts):
    assert expand_counts(compress_counts(counts)) == counts


@given(st.text(alphabet="n0123456789[],-()x ٣", max_size=30))
def test_any_text_expands_or_is_refused(text):
    for expander in (expand, expand_counts):
        try:
            assert expander(text)
        except RankError:
            continue


def test_ten_thousand_nodes():
    names = expand("rack[01-10]node[0001-1000]")
    assert (len(names), names[0], names[-1]) == (10_000, "rack01node0001", "rack10node1000")

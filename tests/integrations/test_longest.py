"""The longest samples of data sets, whatever their fields are."""

import datasets
import pytest
import torch
from tiny_trainings import padded

from tightfit.integrations import longest
from tightfit.integrations.batches import worst_batches
from tightfit.integrations.longest import longest_samples

pytestmark = pytest.mark.keeps("plan-holds-longest-samples")

LENGTHS = [(3, 9), (7, 2), (1, 1), (5, 8), (4, 4)]  # of two fields of each sample


def pairs():
    return [{"chosen": [1] * a, "rejected": [2] * b, "score": 0.5} for a, b in LENGTHS]


def test_the_most_in_all_fields_then_in_each_of_them_and_the_least():
    assert longest_samples(pairs()) == ([3, 1, 0], 2)


@pytest.mark.parametrize("rows", [2, 10_000])
def test_a_data_set_is_read_in_parts_and_one_of_arrow_off_its_table(rows, monkeypatch):
    monkeypatch.setattr(longest, "ROWS", rows)
    table = datasets.Dataset.from_list(pairs())
    assert longest_samples(table) == longest_samples(pairs()) == ([3, 1, 0], 2)
    assert longest_samples(table.select([4, 2, 1])) == ([2, 0], 1)  # in the order that is asked for


def test_texts_and_tensors_count_by_their_characters_and_elements():
    texts = [{"text": "abc"}, {"text": "abcdef"}, {"text": "ä"}]
    assert longest_samples(texts) == longest_samples(datasets.Dataset.from_list(texts)) == ([1], 2)
    assert longest_samples([{"input_values": torch.ones(n)} for n in (5, 2, 9)]) == ([2], 1)
    assert longest_samples([(torch.ones(n), 1) for n in (5, 2, 9)]) == ([2], 1)


def test_samples_that_are_alike_or_have_no_sizes_are_not_searched():
    class Images(torch.utils.data.Dataset):
        read = 0

        def __len__(self):
            return 1000

        def __getitem__(self, index):
            self.read += 1
            return {"pixel_values": torch.ones(3, 4, 4), "labels": 1}

    images = Images()
    assert longest_samples(images) is None
    assert images.read < 100
    assert longest_samples([{"label": 1}]) is None
    assert longest_samples([]) is None


def collated(rows):
    def table(name):
        width = max(len(row[name]) for row in rows)
        return torch.tensor([row[name] + [0] * (width - len(row[name])) for row in rows])

    return {"chosen": table("chosen"), "rejected": table("rejected")}


def shapes(batches):
    return [(tuple(batch["chosen"].shape), tuple(batch["rejected"].shape)) for batch in batches]


def test_a_batch_is_tried_that_is_as_long_as_any_in_each_of_its_fields():
    assert ((3, 7), (3, 9)) in shapes(worst_batches(pairs(), 3, collated))
    assert {((1, 5), (1, 8)), ((1, 7), (1, 2)), ((1, 3), (1, 9))} <= set(shapes(worst_batches(pairs(), 1, collated)))


def test_with_one_length_the_longest_comes_by_itself_and_beside_the_shortest():
    batches = worst_batches([{"input_ids": [1] * n} for n in (4, 2, 6)], 2, padded)
    assert [batch["attention_mask"].sum(1).tolist() for batch in batches] == [[4, 2], [6, 6], [6, 2]]

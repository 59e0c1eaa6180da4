"""Experts that are held the same for all tokens, where passes are compared of which near ties decide."""

import torch

from paceline.engine.model.experts import experts_are_same, same_experts

SCORES = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.2, 0.3]])


def test_all_tokens_go_to_the_first_experts_by_their_own_best_scores() -> None:
    with same_experts():
        assert experts_are_same()
        for values, indices in (torch.topk(SCORES, 2, dim=-1), SCORES.topk(k=2), SCORES.topk(2, 1, sorted=False)):
            assert values.sort(descending=True).values.tolist() == torch.tensor([[0.7, 0.2], [0.5, 0.3]]).tolist()
            assert indices.view(-1).tolist() == [0, 1, 0, 1]  # some models view them in another shape
    assert not experts_are_same()
    assert SCORES.topk(2).indices.tolist() == [[1, 2], [0, 2]]


def test_what_is_chosen_among_tokens_stays() -> None:
    with same_experts():
        assert SCORES.topk(1, dim=0).indices.tolist() == [[1, 0, 1]]

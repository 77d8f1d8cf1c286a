"""The prompt stream and the data forms: deterministic, resumable, disjoint from the held-out tasks."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.config import DataConfig, EvalConfig
from asyncrl.data.chat import ChatTemplate
from asyncrl.data.prompts import PromptSource, open_prompts
from asyncrl.data.rows import DataError, read_rows
from tests.unit.byte_model import make_byte_model

SUMS = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
    "operators": ["+"],
    "allow_parentheses": False,
    "allow_negation": False,
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return ChatTemplate(make_byte_model(tmp_path_factory.mktemp("model") / "bytes"))


def sums(template: ChatTemplate, seed: int = 0, num_heldout: int = 0, **data: Any) -> PromptSource:
    config = DataConfig(reasoning_gym="basic_arithmetic", task_args=SUMS, seed=seed, **data)
    return open_prompts(config, EvalConfig(num_tasks=num_heldout), template, 200)


def from_rows(template: ChatTemplate, path: Path, limit: int = 200, **data: Any) -> PromptSource:
    return open_prompts(DataConfig(path=path, **data), EvalConfig(), template, limit)


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class TestChat:
    def test_token_ids_are_those_of_the_template(self, template: ChatTemplate) -> None:
        ids = template.encode([{"role": "user", "content": "hé"}])
        assert template.decode(ids, keep_special=True) == "[user]hé<e>[assistant]"
        assert template.decode(ids) == "[user]hé[assistant]"
        assert len(ids) == len("[user]hé[assistant]".encode()) + 1

    def test_stop_ids_join_tokenizer_and_generation_config(self, template: ChatTemplate) -> None:
        assert template.stop_token_ids == (256, 257)

    def test_a_base_model_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="no chat template"):
            ChatTemplate(make_byte_model(tmp_path / "base", template=None))
        with pytest.raises(DataError, match=r"no tokenizer\.json"):
            ChatTemplate(tmp_path)


class TestProcedural:
    def test_random_access_equals_order(self, template: ChatTemplate) -> None:
        one, two = sums(template), sums(template)
        in_order = [one.prompt_at(idx) for idx in range(1020, 1030)]  # across a chunk's edge
        backwards = [two.prompt_at(idx) for idx in reversed(range(1020, 1030))]
        assert in_order == backwards[::-1]
        assert in_order[0].prompt_idx == 1020

    def test_seeds_differ_and_do_not_overlap_shifted(self, template: ChatTemplate) -> None:
        """reasoning-gym draws task i of seed s from s + i; two of our seeds must not be one shifted."""
        wide = {**SUMS, "max_digits": 4, "min_digits": 4}
        questions = []
        for seed in (0, 1):
            config = DataConfig(reasoning_gym="basic_arithmetic", task_args=wide, seed=seed)
            source = open_prompts(config, EvalConfig(), template, 200)
            questions.append({source.prompt_at(idx).row["question"] for idx in range(2100)})
        assert len(questions[0] & questions[1]) < 5

    def test_heldout_questions_are_distinct_and_never_trained_on(self, template: ChatTemplate) -> None:
        source = sums(template, num_heldout=40)
        heldout = {prompt.row["question"] for prompt in source.heldout}
        assert len(heldout) == 40
        trained = {source.prompt_at(idx).row["question"] for idx in range(1500)}
        assert not trained & heldout
        assert len(trained) > 50
        assert source.num_skipped > 100, "a third of a space of 121 questions is held out"

    def test_substitution_is_deterministic(self, template: ChatTemplate) -> None:
        one, two = sums(template, num_heldout=40), sums(template, num_heldout=40)
        for idx in range(50):
            two.prompt_at(idx)
        assert [one.prompt_at(idx) for idx in range(50, 80)] == [two.prompt_at(idx) for idx in range(50, 80)]

    def test_too_many_heldout_tasks_is_an_error(self, template: ChatTemplate) -> None:
        with pytest.raises(DataError, match=r"eval\.num_tasks = 500: only 121 distinct"):
            sums(template, num_heldout=500)

    def test_everything_too_long_is_an_error(self, template: ChatTemplate) -> None:
        config = DataConfig(reasoning_gym="basic_arithmetic", task_args=SUMS)
        source = open_prompts(config, EvalConfig(), template, 5)
        with pytest.raises(DataError, match="max_prompt_tokens = 5"):
            source.prompt_at(0)

    def test_system_prompt_and_suffix(self, template: ChatTemplate) -> None:
        prompt = sums(template, system_prompt="Be brief.", prompt_suffix=" Now.").prompt_at(3)
        text = template.decode(prompt.token_ids)
        assert text == f"[system]Be brief.[user]{prompt.row['question']} Now.[assistant]"

    def test_wrong_names_are_explained(self, template: ChatTemplate) -> None:
        with pytest.raises(DataError, match="nearest: basic_arithmetic"):
            open_prompts(DataConfig(reasoning_gym="basic_aritmetic"), EvalConfig(), template, 9).prompt_at(0)
        with pytest.raises(DataError, match="task_args do not suit basic_arithmetic"):
            config = DataConfig(reasoning_gym="basic_arithmetic", task_args={"terms": 2})
            open_prompts(config, EvalConfig(), template, 9).prompt_at(0)
        with pytest.raises(DataError, match=r"seed is set by data\.seed"):
            config = DataConfig(reasoning_gym="basic_arithmetic", task_args={"seed": 2})
            open_prompts(config, EvalConfig(), template, 9)


class TestRowStream:
    def test_every_epoch_is_another_permutation(self, template: ChatTemplate, tmp_path: Path) -> None:
        rows = [{"prompt": f"q{idx}", "answer": idx} for idx in range(20)]
        source = from_rows(template, write_jsonl(tmp_path / "d.jsonl", rows))
        epochs = [[source.prompt_at(20 * e + i).row["answer"] for i in range(20)] for e in range(3)]
        assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3
        again = from_rows(template, tmp_path / "d.jsonl")
        assert [again.prompt_at(20 + i).row["answer"] for i in range(20)] == epochs[1]

    def test_overlong_rows_are_counted_and_left_out(self, template: ChatTemplate, tmp_path: Path) -> None:
        rows = [{"prompt": "x" * (1 + 99 * (idx % 2)), "answer": idx} for idx in range(10)]
        source = from_rows(template, write_jsonl(tmp_path / "d.jsonl", rows), limit=50)
        assert source.num_skipped == 5
        assert Counter(source.prompt_at(i).row["answer"] for i in range(10)) == dict.fromkeys(
            range(0, 10, 2), 2
        )
        with pytest.raises(DataError, match=r"none of 10 rows is usable.*max_prompt_tokens = 3"):
            from_rows(template, tmp_path / "d.jsonl", limit=3)

    def test_heldout_rows_leave_the_training_rows(self, template: ChatTemplate, tmp_path: Path) -> None:
        train = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"q{i}", "answer": i} for i in range(10)])
        test = write_jsonl(tmp_path / "b.jsonl", [{"prompt": f"q{i}", "answer": i} for i in range(8, 14)])
        evaluation = EvalConfig(num_tasks=4, path=test)
        source = open_prompts(DataConfig(path=train), evaluation, template, 99)
        assert [prompt.row["answer"] for prompt in source.heldout] == [8, 9, 10, 11]
        assert {source.prompt_at(idx).row["answer"] for idx in range(8)} == set(range(8))


class TestForms:
    def test_verl_parquet(self, tmp_path: Path) -> None:
        row = {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {"split": "train", "index": 7},
        }
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "v.parquet")
        (task,) = read_rows(tmp_path / "v.parquet")
        assert task.row["answer"] == "2"
        assert task.row["extra_info"]["index"] == 7
        assert task.row["data_source"] == "openai/gsm8k"
        assert [message["role"] for message in task.messages] == ["system", "user"]
        assert task.question == "1+1?"

    def test_slime_keys(self, tmp_path: Path) -> None:
        file = write_jsonl(tmp_path / "s.jsonl", [{"input": "hi", "label": "yo", "metadata": {"k": 1}}])
        (task,) = read_rows(file, prompt_key="input", answer_key="label")
        assert task.messages == ({"role": "user", "content": "hi"},)
        assert task.row == {"input": "hi", "label": "yo", "metadata": {"k": 1}, "answer": "yo"}

    def test_dataset_folders(self, tmp_path: Path) -> None:
        saved = tmp_path / "saved" / "train"
        saved.mkdir(parents=True)
        table = pa.Table.from_pylist([{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}])
        with pa.ipc.new_stream(saved / "data-00000-of-00001.arrow", table.schema) as stream:
            stream.write_table(table)
        (saved / "state.json").write_text(
            json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})
        )
        (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
        assert [task.row["answer"] for task in read_rows(tmp_path / "saved")] == ["1", "2"]

        (tmp_path / "hub" / "data").mkdir(parents=True)
        for split in ("test", "train"):
            pq.write_table(
                pa.table({"prompt": [split]}), tmp_path / "hub" / "data" / f"{split}-00000.parquet"
            )
        assert [task.question for task in read_rows(tmp_path / "hub")] == ["train"]

    def test_dates_survive_to_the_row(self, tmp_path: Path) -> None:
        day = datetime.date(2026, 1, 2)
        pq.write_table(
            pa.Table.from_pylist([{"prompt": "p", "answer": "1", "day": day}]), tmp_path / "d.parquet"
        )
        assert read_rows(tmp_path / "d.parquet")[0].row["day"] == day

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{", r"d\.jsonl:2: not JSON"),
            ("[1]", r"d\.jsonl:2: expected an object, found list"),
            ('{"question": "x"}', r"d\.jsonl:2: no 'prompt' .*keys: question"),
            ('{"prompt": " ", "answer": 1}', r"d\.jsonl:2: 'prompt' is empty"),
            (
                '{"prompt": 3, "answer": 1}',
                r"d\.jsonl:2: 'prompt' must be text or a list of messages, found int",
            ),
            ('{"prompt": [{"role": "user"}], "answer": 1}', r"d\.jsonl:2: 'prompt': not a message"),
            ('{"prompt": [{"role": "me", "content": "x"}], "answer": 1}', r"d\.jsonl:2: .*not a message"),
            ('{"prompt": "x"}', r"d\.jsonl:2: no 'answer', which the rows before it have"),
        ],
    )
    def test_a_broken_row_is_named(self, tmp_path: Path, line: str, message: str) -> None:
        (tmp_path / "d.jsonl").write_text(f'{{"prompt": "x", "answer": 1}}\n{line}\n')
        with pytest.raises(DataError, match=message):
            read_rows(tmp_path / "d.jsonl")

    def test_broken_files_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"nothing\.jsonl: no such file"):
            read_rows(tmp_path / "nothing.jsonl")
        (tmp_path / "x.csv").write_text("a,b\n")
        with pytest.raises(DataError, match=r"unknown format '\.csv'"):
            read_rows(tmp_path / "x.csv")
        (tmp_path / "x.parquet").write_text("not parquet at all")
        with pytest.raises(DataError, match=r"x\.parquet: not readable"):
            read_rows(tmp_path / "x.parquet")
        (tmp_path / "empty.jsonl").write_text("\n")
        with pytest.raises(DataError, match="no rows"):
            read_rows(tmp_path / "empty.jsonl")

#!/usr/bin/env bash
# datasets 5.0.1 gives a column of mixed types its type Json, and changes values when it stores them: a text that its
# parser of JSON accepts is stored without quotes, so that the texts 007, 1.50, 1e5 and null come back as the numbers 7,
# 1.5 and 100000.0 and as None, and numbers are rounded to ten digits behind the point. Nothing warns. This matters for
# answers of reinforcement learning: a file of JSON lines with the answers "007" and 3 compares with 7 after
# load_dataset, save_to_disk or to_parquet, and 0.12345678901234 with 0.12345678900000001.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.0.1 pandas==3.1.1 pyarrow==26.0.1
cd "$folder"
HF_HOME="$folder/cache" HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import json
import sys

import datasets

datasets.disable_progress_bars()
written = [3, "a", "007", "1.50", "1e5", "null", 0.12345678901234]
with open("rows.jsonl", "w") as file:
    file.writelines(json.dumps({"answer": answer}) + "\n" for answer in written)
loaded = datasets.load_dataset("json", data_files="rows.jsonl", split="train")
made = datasets.Dataset.from_list([{"answer": answer} for answer in written], on_mixed_types="use_json")
print("the type of the column:", loaded.features["answer"])
for answer, after_loading, after_making in zip(written, loaded["answer"], made["answer"], strict=True):
    print(f"{answer!r} becomes {after_loading!r} by load_dataset, {after_making!r} by from_list")
seen = [3, "a", 7, 1.5, 100000.0, None, 0.12345678900000001]
if list(loaded["answer"]) != seen or list(made["answer"]) != seen:
    sys.exit("the behaviour has changed: the values are not those that were seen with datasets 5.0.1")
PYTHON

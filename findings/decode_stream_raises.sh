#!/usr/bin/env bash
# tokenizers 0.22.2: with byte fallback (the tokenizers of Gemma and Llama 2), DecodeStream raises an exception after one
# stray byte, and decode turns whole characters beside a stray byte to U+FFFD.
#
# DecodeStream is the way to stream text that copes with characters of several byte tokens. But a model may write any
# bytes. After 日 (three byte tokens), a stray byte and the token "a", its step raises "Invalid prefix encountered", and
# decode gives "����a", without 日. It matters to every server and trainer that streams or scores a model's answers: an
# answer that is cut inside a character loses the characters before it. A decoder of runs of bytes as UTF-8 with
# replacement keeps them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tokenizers==0.22.2
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import sys

from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a"]
vocabulary = {piece: number for number, piece in enumerate(pieces)}
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
stray = [*(1 + byte for byte in "日".encode()), 1 + 0xFF, vocabulary["a"]]
cut = [1 + byte for byte in "日本".encode()[:5]]
stream, steps = DecodeStream(), []
try:
    steps = [stream.step(tokenizer, number) for number in stray]
    raised = ""
except Exception as error:
    raised = str(error)
print(f"DecodeStream after a stray byte: {raised or steps}")
print(f"decode of 日, a stray byte and a: {tokenizer.decode(stray)!r}; of 日本 without its last byte: {tokenizer.decode(cut)!r}")
if "Invalid prefix" not in raised or tokenizer.decode(stray) != "����a" or tokenizer.decode(cut) != "�����":
    sys.exit("tokenizers now keeps the characters beside a stray byte, or DecodeStream no longer raises")
PYTHON

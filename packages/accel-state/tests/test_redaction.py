from __future__ import annotations

import pytest

from accel_state.redaction import HIDDEN, is_secret, redact, redact_arguments, redact_text

SECRET = "hunter2xyz"

COMMANDS = (
    ["train.py", "--token", SECRET],
    ["--hf-token=" + SECRET],
    ["--hfToken", SECRET],
    ["--apiKey=" + SECRET],
    ["--passwd=" + SECRET],
    ["--db_pass", SECRET],
    ["-e", "WANDB_API_KEY=" + SECRET],
    ["+wandb.api_key=" + SECRET],
    ["--openai-api-key " + SECRET],
    ["--client_secret=" + SECRET],
    ["--set", "aws.secretAccessKey=" + SECRET],
    ["--dsn=" + SECRET],
    ["--cookie=" + SECRET],
    ["--pin", SECRET],
    ["-u", "me:" + SECRET],
    ["--password", "123456"],
    ["--password=my " + SECRET],
)

TEXTS = (
    '{"a": 1, "password": "SECRET"}',
    '{"api_key": "SECRET"}',
    "https://u:SECRET@host/x",
    "postgres://u:a/SECRET@host/x",
    "https://SECRET@github.com/x",
    "redis://:SECRET@host:1",
    "s3://b/k?X-Amz-Signature=SECRET&x=1",
    "https://host/?access_token=SECRET",
    "Authorization: Bearer SECRET",
    "--header=Authorization: Basic SECRET",
    "Server=x;Password=SECRET;",
    "AccountKey=SECRET",
    "MYSQL_PWD=SECRET",
    "token:SECRET",
    "x-api-key: SECRET",
    "export GITHUB_TOKEN='SECRET'",
    "os.environ['HF_TOKEN'] = 'SECRET'",
    'os.environ.get("HF_TOKEN", "SECRET")',
    "login(token='SECRET')",
    '+    api_key: str = "SECRET"',
    "+password = '''\nSECRET\n'''",
    "passphrase = a SECRET b",
    'set_token("SECRET")',
    "machine github.com login me password SECRET",
    "curl -u me:SECRET https://x",
    "AWS_SESSION_TOKEN%3DSECRET",
    "-----BEGIN RSA PRIVATE KEY-----\n+SECRET\n",
    "hf_abcDEF123456SECRET",
    "ghp_SECRETSECRET",
    "sk-proj-SECRETSECRET",
    "https://hooks.slack.com/services/SECRET",
    "key AKIAABCDEFGHIJKLMNOP",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SECRET",
    "Zm9vYmFyMTIzNDU2Nzg5MGFiY2RlZkdISktMTU5PUA==",
)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_secrets_of_command_lines_are_hidden(words: list[str]) -> None:
    shown = redact_arguments(words)
    assert HIDDEN in " ".join(shown)
    assert not any(part in " ".join(shown) for part in (SECRET, "123456"))
    assert len(shown) == len(words)


@pytest.mark.parametrize("text", TEXTS)
def test_secrets_of_texts_are_hidden(text: str) -> None:
    shown = redact_text(text.replace("SECRET", SECRET))
    assert HIDDEN in shown
    assert not any(part in shown for part in (SECRET, "AKIA", "Zm9v"))
    assert redact_arguments([text.replace("SECRET", SECRET)]) == [shown] or SECRET not in str(redact_arguments([text]))


@pytest.mark.parametrize(
    "word",
    [
        "--lr=0.1",
        "--max_tokens=128",
        "--tokens=512",
        "--pad_token=<pad>",
        "--text_key=text",
        "--num_key_value_heads=8",
        "--tokenizer=gpt2",
        "--use_auth=true",
        "--model=meta-llama/Llama-3.1-8B-Instruct",
        "--revision=0123456789abcdef0123456789abcdef01234567",
        "http://host:8080/a@b",
        "git@github.com:x/y.git",
        "/data/Runs2024/ExperimentWithALongName1234567/ab",
        "a: b = c",
    ],
)
def test_other_values_stay(word: str) -> None:
    assert redact_arguments([word]) == [word]


def test_values_of_nested_data_are_hidden_by_their_keys() -> None:
    given = {"lr": 0.1, "hub": {"token": SECRET, "ids": [1, None]}, "credentials": {"user": "me", "x": [SECRET]}}
    shown = redact(given)
    assert shown == {
        "lr": 0.1,
        "hub": {"token": HIDDEN, "ids": [1, None]},
        "credentials": HIDDEN if isinstance(shown["credentials"], str) else {"user": HIDDEN, "x": HIDDEN},
    }
    assert SECRET not in str(shown)


@pytest.mark.parametrize(
    "text", ["a" * 50_000, "x=" * 25_000, "a:/b" * 12_000, "http://a:b" * 5_000, "A1" * 25_000 + "-"]
)
def test_long_texts_take_linear_time(text: str) -> None:
    # Quadratic ones take minutes, and the limit of the test ends them.
    assert redact_text(text)


def test_numbers_are_no_tokens_unless_the_name_says_so() -> None:
    assert not is_secret("tokens", 4096)
    assert is_secret("token", 4096)

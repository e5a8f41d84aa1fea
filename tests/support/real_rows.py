"""A few rows with the columns of each real data set that conf/data names."""

TLDR = [
    {
        "info": {
            "id": f"t3_{i}",
            "post": f"post {i}",
            "title": "title",
            "article": None,
            "site": None,
            "subreddit": "aww",
        },
        "summaries": [
            {"text": f"first {i}", "policy": "sup2", "note": "ok"},
            {"text": f"second {i}", "policy": "ref", "note": None},
        ],
        "choice": i % 2,
        "worker": f"w{i % 3}",
        "batch": "batch3.json",
        "split": "train",
        "extra": {"confidence": None},
    }
    for i in range(12)
]
SHP = [
    {
        "post_id": f"p{i // 2}",
        "domain": f"ask{i // 2 % 3}_train",
        "upvote_ratio": 0.98,
        "history": f"question {i // 2}",
        "c_root_id_A": "a",
        "c_root_id_B": "b",
        "created_at_utc_A": 1,
        "created_at_utc_B": 2,
        "score_A": 20 if i % 2 else 3,
        "score_B": 10,
        "human_ref_A": f"one {i}",
        "human_ref_B": f"other {i}",
        "labels": i % 2,
        "seconds_difference": 1.0,
        "score_ratio": 2.0,
    }
    for i in range(400)
]
SAFERLHF = [
    {
        "prompt": f"how {i // 2}",
        "response_0": "x",
        "response_1": "y",
        "is_response_0_safe": True,
        "better_response_id": 0,
        "safer_response_id": 1,
    }
    for i in range(6)
]
ALPACA = [
    {"instruction": f"do {i}", "input": "this" if i % 3 == 0 else "", "output": "done", "text": "..."}
    for i in range(40)
]
UKP = [
    {
        "pair_id": f"a{i}",
        "topic": topic,
        "prompt": "claim",
        "response_a": f"one {i}",
        "response_b": f"other {i}",
        "choice": ("a", "b", "tie")[i % 3],
        "worker": f"w{i % 2}",
    }
    for i, topic in enumerate(
        [
            "tv-is-better-than-books_tv",
            "should-physical-education-be-mandatory-in-schools-_no-",
            *["is-porn-wrong-_yes"] * 16,
        ]
    )
]
MTBENCH = [
    {
        "question_id": i,
        "category": "writing" if i % 4 == 0 else "math",
        "turn": 1,
        "judge": f"j{i % 2}",
        "model_a": "m",
        "model_b": "n",
        "prompts": ["one", "two"],
        "answers_a": [f"x {i}", "y"],
        "answers_b": [f"z {i}", "y"],
        "winner": ("model_a", "model_b", "tie")[i % 3],
    }
    for i in range(20)
]
TLDR_PROMPTS = [
    {"subreddit": "aww", "title": "title", "post": f"anna paints walls . post {i} .", "summary": ""}
    for i in range(8)
]

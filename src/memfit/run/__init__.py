"""Running for real: train, measure, verify, recover. What a run leaves behind lies in its folder."""

"""What a training arm runs: build, step, ranks, checkpoint, evaluation."""

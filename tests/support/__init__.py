"""What several tests need: models, programs for ranks, comparisons, damaged inputs."""

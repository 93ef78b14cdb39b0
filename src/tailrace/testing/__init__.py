"""Tests for what users build on Tailrace: its promises as checks that anyone can run."""

"""For tests of what a user builds on Tailrace: what it promises, as checks that anyone can run."""

"""Tests of lanes. The contract is a module that test modules import: its assertions are to be explained, too."""

import pytest

pytest.register_assert_rewrite("tests.lanes.contract")

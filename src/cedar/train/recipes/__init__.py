"""Recipes: functions that return a whole `TrainConfig`, addressed as `recipes.MODULE:FUNCTION`."""

from __future__ import annotations

import importlib
import pkgutil

from cedar.errors import TrainingError
from cedar.train.config import TrainConfig

__all__ = ["load_recipe", "recipe_names"]


def recipe_names() -> list[str]:
    """The recipes that Cedar brings, as `recipes.MODULE:FUNCTION`."""
    names: list[str] = []
    for module in pkgutil.iter_modules(__path__):
        loaded = importlib.import_module(f"{__name__}.{module.name}")
        names += [f"recipes.{module.name}:{name}" for name in loaded.__all__]
    return sorted(names)


def load_recipe(name: str) -> TrainConfig:
    """Call the recipe `recipes.MODULE:FUNCTION`, or `package.module:function` of your own.

    Raises:
        TrainingError: the name has another form, nothing is found there, or what is found does
            not return a TrainConfig.
    """
    module_name, colon, function_name = name.partition(":")
    known = ", ".join(recipe_names())
    if not colon or not module_name or not function_name:
        raise TrainingError(
            f"{name!r} is not a recipe; expected module:function. Cedar brings: {known}."
        )
    path = f"cedar.train.{module_name}" if module_name.startswith("recipes.") else module_name
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        # A missing dependency inside the user's own module is another matter than a wrong name.
        if error.name is None or not (path == error.name or path.startswith(error.name + ".")):
            raise
        raise TrainingError(
            f"The recipe {name!r} names the module {module_name!r}, which does not exist. "
            f"Cedar brings: {known}."
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise TrainingError(
            f"The module {module_name!r} has no function {function_name!r}. Cedar brings: {known}."
        )
    config = function()
    if not isinstance(config, TrainConfig):
        raise TrainingError(
            f"The recipe {name!r} returned a {type(config).__name__}; expected a TrainConfig."
        )
    return config

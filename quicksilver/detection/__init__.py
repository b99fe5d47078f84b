"""A detector of cars and pedestrians in lidar-like scenes, whose transformer encoder the runtime halts tokens of."""

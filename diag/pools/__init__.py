"""Phase separation judged: two pools side by side, the link between them, versions, and the split that balances."""

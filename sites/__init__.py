"""What runs inside one data center: agent, launcher, gateway, worker library, trainer."""

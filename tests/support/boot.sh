#!/bin/sh
# boot.sh UNITS SCRATCH: systemd as the first process of namespaces of its own, on an overlay of this
# machine's files, with the units of the folder UNITS; nothing outside changes but what the units
# serve. For `unshare --mount --pid --fork --cgroup`.
set -e
root=$2/root
mount --make-rprivate /
mount -t tmpfs tmpfs "$2"
mkdir "$root" "$2/upper" "$2/work" "$2/units"
mount -t overlay overlay -o "lowerdir=/,upperdir=$2/upper,workdir=$2/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /dev "$root/dev"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs tmpfs "$root/run"
rm -rf "$root"/etc/systemd/system/*
cp "$1"/* "$root/etc/systemd/system"
printf '[Unit]\nDefaultDependencies=no\nWants=dovetail.target systemd-journald.service\n' \
    >"$root/etc/systemd/system/tried.target"
cd "$root"
pivot_root . mnt
umount -l /mnt
exec /lib/systemd/systemd --system --unit=tried.target

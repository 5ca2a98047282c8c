//! The privileges of a helper. A root helper keeps its own; another user's helper becomes root in a new user namespace.

use std::fs;
use std::io;

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::process::{
    DumpableBehavior, Signal, getegid, geteuid, set_dumpable_behavior,
    set_parent_process_death_signal,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, UnshareFlags, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_thread_groups, unshare_unsafe,
};

use super::messages::HelperTask;
use crate::sandbox::spec::SANDBOX_UID;

/// Gives this process, which has one thread, the privileges to make the container.
pub(super) fn acquire_privileges(task: &HelperTask) -> io::Result<()> {
    if task.is_rootless {
        enter_user_namespace(0).map_err(|error| {
            let why = "only root may make a container here, as user namespaces are denied";
            io::Error::new(error.kind(), format!("{why}: {error}"))
        })?;
    } else {
        // The runtime sets the container's supplementary groups only if the container has some. Root's own groups would
        // otherwise stay in the container.
        set_thread_groups(&[])?;
    }
    if task.cgroup.is_none() {
        bind_own_cgroup()?;
    }
    Ok(())
}

/// Switches to the sandbox's user without any privilege: the last step of a rootless container.
pub(super) fn switch_to_user() -> io::Result<()> {
    // 1. Become dumpable: otherwise this process may not write the maps of its users in `/proc/self`.
    set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    // 2. Enter a namespace in which this process has the sandbox's user.
    enter_user_namespace(SANDBOX_UID)?;
    // 3. Drop every capability: the creator of a user namespace has all of them in the namespace.
    for (_, capability) in CapabilitySet::all().iter_names() {
        remove_capability_from_bounding_set(capability)?;
    }
    clear_ambient_capability_set()?;
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    // 4. Arm the parent death signal again: the kernel has cleared the signal with the change of privileges.
    Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
}

/// Enters a new user namespace, in which this process's user and group have the number `uid`.
fn enter_user_namespace(uid: u32) -> io::Result<()> {
    let (user, group) = (geteuid().as_raw(), getegid().as_raw());
    unshare_namespaces(UnshareFlags::NEWUSER)?;
    // Without root, the kernel accepts a map of groups only after `setgroups` is denied (user_namespaces(7)).
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("{uid} {user} 1"))?;
    fs::write("/proc/self/gid_map", format!("{uid} {group} 1"))
}

/// Mounts this process's own cgroup at the path where the runtime looks for cgroups. The runtime puts every container
/// into a cgroup; if this process may not make one, the runtime sees only the cgroup that the process is in.
fn bind_own_cgroup() -> io::Result<()> {
    unshare_namespaces(UnshareFlags::NEWNS | UnshareFlags::NEWCGROUP)?;
    // Private, so that the mount below does not reach the machine's own mounts.
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Ok(mount("cgroup2", "/sys/fs/cgroup", "cgroup2", flags, None)?)
}

#[expect(
    unsafe_code,
    reason = "some flags would take away what the threads share; a namespace flag does not"
)]
pub(super) fn unshare_namespaces(namespaces: UnshareFlags) -> io::Result<()> {
    // SAFETY: nothing that is shared between threads is taken away, and there is one thread only.
    Ok(unsafe { unshare_unsafe(namespaces) }?)
}

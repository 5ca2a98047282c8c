//! What a helper may do. Root's keeps to it; another user's makes itself root of a world in which nobody else is.

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

/// Makes this process, which has one thread, able to make the container.
pub(super) fn acquire_privileges(task: &HelperTask) -> io::Result<()> {
    if task.is_rootless {
        enter_user_namespace(0).map_err(|error| {
            let why = "only root may make a container here, as user namespaces are denied";
            io::Error::new(error.kind(), format!("{why}: {error}"))
        })?;
    } else {
        // The runtime sets the container's groups only where it has some, and root has some.
        set_thread_groups(&[])?;
    }
    if task.cgroup.is_none() {
        bind_own_cgroup()?;
    }
    Ok(())
}

/// The last step of a container that has no root: its user is the sandbox's, with no privilege over anything.
pub(super) fn switch_to_user() -> io::Result<()> {
    // What a process may say of its own users depends on it.
    set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    enter_user_namespace(SANDBOX_UID)?;
    // Whoever makes a namespace has every capability in it.
    for (_, capability) in CapabilitySet::all().iter_names() {
        remove_capability_from_bounding_set(capability)?;
    }
    clear_ambient_capability_set()?;
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    // It was forgotten with the change of privileges.
    Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
}

/// In there this user is `uid`, and this group, too.
fn enter_user_namespace(uid: u32) -> io::Result<()> {
    let (user, group) = (geteuid().as_raw(), getegid().as_raw());
    unshare_namespaces(UnshareFlags::NEWUSER)?;
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("{uid} {user} 1"))?;
    fs::write("/proc/self/gid_map", format!("{uid} {group} 1"))
}

/// The runtime puts every container into a group. Where that is not for us to do, it sees the group that we are in, and
/// nothing else, at the place where it looks.
fn bind_own_cgroup() -> io::Result<()> {
    unshare_namespaces(UnshareFlags::NEWNS | UnshareFlags::NEWCGROUP)?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Ok(mount("cgroup2", "/sys/fs/cgroup", "cgroup2", flags, None)?)
}

#[expect(
    unsafe_code,
    reason = "of what can be taken from a thread, some would be missed; not this"
)]
pub(super) fn unshare_namespaces(namespaces: UnshareFlags) -> io::Result<()> {
    // SAFETY: nothing that is shared between threads is taken away, and there is one thread only.
    Ok(unsafe { unshare_unsafe(namespaces) }?)
}

//! The version of Landlock, which the kernel tells by a system call only.

use std::ptr;

/// None where the kernel has none, or was started without it.
#[expect(unsafe_code, reason = "there is no safe call that asks for the version")]
pub(super) fn landlock_version() -> Option<u32> {
    // SAFETY: asked for its version the kernel takes no attributes, and so neither reads nor writes memory of ours.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            ptr::null::<libc::c_void>(),
            0_usize,
            CREATE_RULESET_VERSION,
        )
    };
    u32::try_from(version).ok()
}

/// `LANDLOCK_CREATE_RULESET_VERSION` of linux/landlock.h.
const CREATE_RULESET_VERSION: u32 = 1;

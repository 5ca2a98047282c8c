//! The version of Landlock, which the kernel reports only through a system call.

use std::ptr;

/// Returns the version of Landlock; `None` if the kernel has no Landlock, or was started without it.
#[expect(unsafe_code, reason = "there is no safe call that asks for the version")]
pub(super) fn landlock_version() -> Option<u32> {
    // SAFETY: for this flag the kernel takes no attributes, so it neither reads nor writes this process's memory.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            ptr::null::<libc::c_void>(),
            0_usize,
            CREATE_RULESET_VERSION,
        )
    };
    // A failed call returns -1, which is not a version.
    u32::try_from(version).ok()
}

/// `LANDLOCK_CREATE_RULESET_VERSION` of linux/landlock.h.
const CREATE_RULESET_VERSION: u32 = 1;

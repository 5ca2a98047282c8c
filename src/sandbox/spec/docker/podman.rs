//! The differences of Podman's API from Docker Engine's.

use std::path::Path;

use bollard::models::ContainerCreateBody;

use super::resource_limit;
use crate::sandbox::spec::layout::MASKED_PATHS;

/// The highest limits that the user of Podman's service may request.
#[derive(Clone, Copy, Debug)]
pub struct UserLimits {
    pub processes: u64,
    pub open_files: u64,
}

/// Changes a request for Docker Engine, as [`container_body`](super::container_body) builds it, into the same request
/// for Podman.
///
/// - Podman reads the filter of system calls from a file of its machine; Docker takes the text.
/// - A tmpfs always belongs to root. So a tmpfs for one user is opened to all users: there is no other user inside.
/// - Podman would fill a tmpfs with the image's files at that path.
/// - Podman would make `/var/tmp` writable if the request does not mention it.
/// - Podman does not read the request's list of masked paths, but it has an option for them.
pub fn translate_for_podman(body: &mut ContainerCreateBody, seccomp: &Path, most: UserLimits) {
    limit_for_podman(body, most);
    let Some(host) = &mut body.host_config else { return };
    for option in host.security_opt.iter_mut().flatten() {
        if option.starts_with("seccomp=") {
            *option = format!("seccomp={}", seccomp.display());
        }
    }
    let masked = format!("mask={}", MASKED_PATHS.join(":"));
    host.security_opt.get_or_insert_default().push(masked);
    for options in host.tmpfs.iter_mut().flat_map(|tmpfs| tmpfs.values_mut()) {
        let adapted = options.split(',').filter(|option| !is_owner_option(option));
        let adapted: Vec<_> =
            adapted.map(|option| option.replace("mode=0700", "mode=1777")).collect();
        *options = adapted.join(",") + ",notmpcopyup";
    }
    let closed = "ro,nosuid,nodev,noexec,size=4k,mode=0555,notmpcopyup".to_owned();
    host.tmpfs.get_or_insert_default().insert("/var/tmp".to_owned(), closed);
}

/// Requests no more processes and open files than Podman's service may allow, or the container would not start. Podman
/// by itself requests more if the request does not mention them. `pids_limit` bounds the container in any case.
pub fn limit_for_podman(body: &mut ContainerCreateBody, most: UserLimits) {
    let Some(host) = &mut body.host_config else { return };
    let limits = host.ulimits.get_or_insert_default();
    let wanted = limits.iter().find(|limit| limit.name.as_deref() == Some(OPEN_FILES));
    let wanted = wanted.and_then(|limit| u64::try_from(limit.hard?).ok());
    let files = wanted.unwrap_or(MAX_OPEN_FILES).min(most.open_files);
    limits.retain(|limit| limit.name.as_deref() != Some(OPEN_FILES));
    limits.extend([(OPEN_FILES, files), ("nproc", most.processes)].map(resource_limit));
}

/// The name of the limit of open files.
const OPEN_FILES: &str = "nofile";

/// The open files of a container whose request names no number: the default of Docker Engine and Podman.
const MAX_OPEN_FILES: u64 = 1 << 20;

fn is_owner_option(option: &str) -> bool {
    option.starts_with("uid=") || option.starts_with("gid=")
}

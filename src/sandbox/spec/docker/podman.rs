//! The differences of Podman's API from Docker Engine's.

use std::path::Path;

use bollard::models::ContainerCreateBody;

use super::resource_limit;

/// Changes a request for Docker Engine, as [`container_body`](super::container_body) builds it, into the same request
/// for Podman.
///
/// - Podman reads the filter of system calls from a file of its machine; Docker takes the text.
/// - A tmpfs always belongs to root. So a tmpfs for one user is opened to all users: there is no other user inside.
/// - Podman would fill a tmpfs with the image's files at that path.
/// - Podman would make `/var/tmp` writable if the request does not mention it.
/// - Podman would request more processes than it may allow if the request does not mention them. `processes` is the
///   number that it may allow; `pids_limit` bounds the sandbox in both cases.
pub fn translate_for_podman(body: &mut ContainerCreateBody, seccomp: &Path, processes: u64) {
    let Some(host) = &mut body.host_config else { return };
    for option in host.security_opt.iter_mut().flatten() {
        if option.starts_with("seccomp=") {
            *option = format!("seccomp={}", seccomp.display());
        }
    }
    host.ulimits.get_or_insert_default().push(resource_limit(("nproc", processes)));
    for options in host.tmpfs.iter_mut().flat_map(|tmpfs| tmpfs.values_mut()) {
        let kept = options.split(',').filter(|option| !is_owner_option(option));
        let kept: Vec<_> = kept.map(|option| option.replace("mode=0700", "mode=1777")).collect();
        *options = kept.join(",") + ",notmpcopyup";
    }
    let closed = "ro,nosuid,nodev,noexec,size=4k,mode=0555,notmpcopyup".to_owned();
    host.tmpfs.get_or_insert_default().insert("/var/tmp".to_owned(), closed);
}

fn is_owner_option(option: &str) -> bool {
    option.starts_with("uid=") || option.starts_with("gid=")
}

//! Where Podman's words for the same thing are others than Docker Engine's.

use std::path::Path;

use bollard::models::ContainerCreateBody;

use super::resource_limit;

/// Says to Podman what [`create_body`](super::container_body) says to Docker Engine.
///
/// It reads the filter of system calls from a file of its own machine, where Docker takes the text. Its tmpfs belong to
/// root whatever is said, so those of one user are open to all: there is no other user inside. It would fill them with
/// what the image has there. Where nothing is said of `/var/tmp`, it makes that writable, and where nothing is said of
/// processes, it asks for more than it may allow: `processes` is what it may, and `pids_limit` is the limit all the same.
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

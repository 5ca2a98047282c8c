//! R3: The compiled seccomp filter agrees with Docker's profile file, call by call.

use std::collections::{BTreeMap, BTreeSet};

use cogni_gateway::sandbox::spec::SECCOMP_PROFILE;
use cogni_gateway::sandbox::spec::seccomp::{SeccompFilters, compile_profile};
use seccompiler::sock_filter;
use serde_json::Value;
use syscalls::Sysno;

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const NOSYS: u32 = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
const PERM: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;

/// R3: Each system call of this architecture has the result that the file states, also with the arguments of
/// conditional rules.
#[test]
fn each_call_ends_as_the_file_says() {
    let filters = compile_profile(SECCOMP_PROFILE).unwrap();
    let expected = expected_results();
    for call in Sysno::iter() {
        let (name, number) = (call.name(), call.id().into());
        let zeros = evaluate_filters(&filters, number, [0; 6]);
        match name {
            "clone" | "execveat" | "ioctl" | "personality" => assert_eq!(zeros, ALLOW, "{name}"),
            "socket" => assert_eq!(zeros, NOSYS),
            // The file's default answer is for calls that the file does not name.
            _ => assert_eq!(zeros, *expected.get(name).unwrap_or(&NOSYS), "{name}"),
        }
    }
    let of = |name: &str, args| evaluate_filters(&filters, call_number(name), args);
    let namespaces =
        [libc::CLONE_NEWUSER, libc::CLONE_NEWNET, libc::CLONE_NEWNS, libc::CLONE_NEWPID];
    for flag in namespaces {
        assert_eq!(of("clone", [as_argument(flag | libc::SIGCHLD), 0, 0, 0, 0, 0]), NOSYS);
    }
    assert_eq!(of("clone", [as_argument(libc::CLONE_VM | libc::SIGCHLD), 0, 0, 0, 0, 0]), ALLOW);
    assert_eq!(of("execveat", [0, 0, 0, 0, as_argument(libc::AT_EMPTY_PATH), 0]), NOSYS);
    assert_eq!(of("personality", [0xffff_ffff, 0, 0, 0, 0, 0]), ALLOW);
    assert_eq!(of("personality", [as_argument(libc::ADDR_NO_RANDOMIZE), 0, 0, 0, 0, 0]), NOSYS);
    for (family, protocol, ends) in [
        (libc::AF_UNIX, 0, ALLOW),
        (libc::AF_INET, 0, ALLOW),
        (libc::AF_INET6, 6, ALLOW),
        (libc::AF_NETLINK, libc::NETLINK_ROUTE, NOSYS),
        (libc::AF_NETLINK, libc::NETLINK_AUDIT, NOSYS),
        (libc::AF_PACKET, 0, NOSYS),
        (libc::AF_VSOCK, 0, NOSYS),
        (libc::AF_ALG, 0, NOSYS),
    ] {
        assert_eq!(
            of("socket", [as_argument(family), 1, as_argument(protocol), 0, 0, 0]),
            ends,
            "{family}"
        );
    }
}

/// R3: A file stays in its project quota, whatever the upper half of the request number is, which the kernel ignores.
/// No other request is denied.
#[test]
fn a_file_cannot_be_taken_out_of_its_quota() {
    const FS_IOC_FSSETXATTR: u64 = 0x401c_5820;
    const FS_IOC_SETFLAGS: u64 = 0x4008_6602;
    let filters = compile_profile(SECCOMP_PROFILE).unwrap();
    let of = |request| evaluate_filters(&filters, libc::SYS_ioctl, [3, request, 0, 0, 0, 0]);
    for request in [FS_IOC_FSSETXATTR, FS_IOC_SETFLAGS] {
        assert_eq!(of(request), NOSYS, "{request:#x}");
        assert_eq!(of(request | 0xdead_beef << 32), NOSYS, "{request:#x}");
    }
    let denied: Vec<_> = (0..=0xffff).filter(|lower| of(0x4008_0000 | lower) != ALLOW).collect();
    assert_eq!(denied, [0x5820, 0x6602]);
}

/// R3: Dangerous calls are denied by number, whatever the table of names says.
#[test]
fn dangerous_calls_are_denied_by_number() {
    let filters = compile_profile(SECCOMP_PROFILE).unwrap();
    for number in [
        libc::SYS_add_key,
        libc::SYS_bpf,
        libc::SYS_clone3,
        libc::SYS_init_module,
        libc::SYS_io_uring_setup,
        libc::SYS_kexec_load,
        libc::SYS_keyctl,
        libc::SYS_mount,
        libc::SYS_move_mount,
        libc::SYS_open_by_handle_at,
        libc::SYS_open_tree,
        libc::SYS_perf_event_open,
        libc::SYS_pidfd_getfd,
        libc::SYS_pivot_root,
        libc::SYS_process_vm_readv,
        libc::SYS_process_vm_writev,
        libc::SYS_ptrace,
        libc::SYS_reboot,
        libc::SYS_setns,
        libc::SYS_umount2,
        libc::SYS_unshare,
        libc::SYS_userfaultfd,
    ] {
        assert!([PERM, NOSYS].contains(&evaluate_filters(&filters, number, [0; 6])), "{number}");
    }
    // Future calls, and those of x32, which share the architecture.
    for number in (470..1000).chain([0x4000_0000, 0x4000_0000 + libc::SYS_ptrace]) {
        assert_eq!(evaluate_filters(&filters, number, [0; 6]), NOSYS, "{number}");
    }
}

/// R3: The system calls of another architecture have other numbers, so they end the process.
#[test]
fn a_call_of_another_architecture_ends_the_process() {
    let filters = compile_profile(SECCOMP_PROFILE).unwrap();
    let data = seccomp_data(libc::SYS_read, I386, [0; 6]);
    assert_eq!(interpret_program(&filters.allow, &data), libc::SECCOMP_RET_KILL_PROCESS);
}

/// R3: These calls do not exist in an embedded sandbox, and may exist in one of Docker's.
#[test]
fn allowed_calls_that_are_unknown_are_reported() {
    let known: BTreeSet<_> = Sysno::iter().map(|call| call.name()).collect();
    let (mut denied, mut allowed) = (vec![], vec![]);
    for (name, ends) in expected_results().into_iter().filter(|(name, _)| !known.contains(&**name))
    {
        if ends == ALLOW { allowed.push(name) } else { denied.push(name) }
    }
    #[cfg(target_arch = "x86_64")]
    insta::assert_snapshot!(format!("{} / {}", allowed.join(" "), denied.join(" ")), @" / ");
}

/// R3: A rule that the compiler does not understand is an error.
#[test]
fn a_profile_with_unknown_rules_is_refused() {
    let wrong = [
        SECCOMP_PROFILE.replace("SCMP_CMP_MASKED_EQ", "SCMP_CMP_GT"),
        SECCOMP_PROFILE.replacen("SCMP_ACT_ALLOW", "SCMP_ACT_TRACE", 1),
        SECCOMP_PROFILE.replacen(
            "\"defaultAction\": \"SCMP_ACT_ERRNO\"",
            "\"defaultAction\": \"SCMP_ACT_ALLOW\"",
            1,
        ),
        SECCOMP_PROFILE.replacen("\"comment\"", "\"includes\": {}, \"comment\"", 1),
    ];
    for profile in wrong {
        assert_ne!(profile, SECCOMP_PROFILE);
        assert!(compile_profile(&profile).is_err());
    }
}

/// Returns the result that the file states for each call without conditions on arguments.
fn expected_results() -> BTreeMap<String, u32> {
    let profile: Value = serde_json::from_str(SECCOMP_PROFILE).unwrap();
    assert_eq!(profile["defaultErrnoRet"], libc::ENOSYS);
    let mut expected = BTreeMap::new();
    for rule in profile["syscalls"].as_array().unwrap() {
        let ends = match (rule["action"].as_str().unwrap(), rule["errnoRet"].as_i64()) {
            ("SCMP_ACT_ALLOW", None) => ALLOW,
            ("SCMP_ACT_ERRNO", None | Some(1)) => PERM,
            ("SCMP_ACT_ERRNO", Some(38)) => NOSYS,
            other => panic!("{other:?}"),
        };
        for name in rule["names"].as_array().unwrap() {
            expected.insert(name.as_str().unwrap().to_owned(), ends);
        }
    }
    expected
}

fn as_argument(value: i32) -> u64 {
    value.cast_unsigned().into()
}

fn call_number(name: &str) -> i64 {
    name.parse::<Sysno>().unwrap().id().into()
}

/// Evaluates as the kernel does: the later filter first, and the stricter result counts; of two errors, the first.
fn evaluate_filters(filters: &SeccompFilters, number: i64, args: [u64; 6]) -> u32 {
    let data = seccomp_data(number, NATIVE, args);
    let (deny, allow) =
        (interpret_program(&filters.deny, &data), interpret_program(&filters.allow, &data));
    if deny == ALLOW { allow } else { deny }
}

/// The kernel's `struct seccomp_data`.
fn seccomp_data(number: i64, architecture: u32, args: [u64; 6]) -> Vec<u8> {
    let number = u32::try_from(number).unwrap();
    let head = [number, architecture, 0, 0].into_iter().flat_map(u32::to_ne_bytes);
    head.chain(args.into_iter().flat_map(u64::to_ne_bytes)).collect()
}

/// Interprets the part of the kernel's language that a filter uses.
fn interpret_program(program: &[sock_filter], data: &[u8]) -> u32 {
    let (mut at, mut accumulator) = (0, 0);
    loop {
        let sock_filter { code, jt, jf, k } = program[at];
        at += 1;
        let code = u32::from(code);
        let jump = |holds: bool| usize::from(if holds { jt } else { jf });
        match (code & 0x07, code & 0xf0) {
            (libc::BPF_LD, _) => {
                let range = k as usize..k as usize + 4;
                accumulator = u32::from_ne_bytes(data[range].try_into().unwrap());
            }
            (libc::BPF_ALU, libc::BPF_AND) => accumulator &= k,
            (libc::BPF_JMP, libc::BPF_JA) => at += k as usize,
            (libc::BPF_JMP, libc::BPF_JEQ) => at += jump(accumulator == k),
            (libc::BPF_JMP, libc::BPF_JGT) => at += jump(accumulator > k),
            (libc::BPF_JMP, libc::BPF_JGE) => at += jump(accumulator >= k),
            (libc::BPF_RET, _) => return k,
            other => panic!("{other:?}"),
        }
    }
}

/// `AUDIT_ARCH_*` of linux/audit.h.
const I386: u32 = 0x4000_0003;
#[cfg(target_arch = "x86_64")]
const NATIVE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const NATIVE: u32 = 0xc000_00b7;

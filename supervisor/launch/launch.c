//go:build ignore

/*
 * launch makes the system calls of a list, up to execve(2), and ends at the first failure of a call that may
 * not fail. It reads the list (attempt.go) from descriptor 3 and maps it at the address for which its pointers
 * are made. It has no libc, one thread and a few pages, so that it starts at once and the kernel copies next
 * to nothing.
 */
#if defined(__x86_64__)
enum { READ = 0, WRITE = 1, CLOSE = 3, MMAP = 9, PRCTL = 157, EXIT_GROUP = 231 };

static long call(long number, const long *a)
{
	long result;
	register long r10 __asm__("r10") = a[3];
	register long r8 __asm__("r8") = a[4];
	register long r9 __asm__("r9") = a[5];
	__asm__ volatile("syscall"
		: "=a"(result)
		: "a"(number), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(r10), "r"(r8), "r"(r9)
		: "rcx", "r11", "memory");
	return result;
}

__asm__(".globl _start\n_start:\n\txor %ebp, %ebp\n\tand $-16, %rsp\n\tcall start\n");
#elif defined(__aarch64__)
enum { READ = 63, WRITE = 64, CLOSE = 57, MMAP = 222, PRCTL = 167, EXIT_GROUP = 94 };

static long call(long number, const long *a)
{
	register long x8 __asm__("x8") = number;
	register long x0 __asm__("x0") = a[0];
	register long x1 __asm__("x1") = a[1];
	register long x2 __asm__("x2") = a[2];
	register long x3 __asm__("x3") = a[3];
	register long x4 __asm__("x4") = a[4];
	register long x5 __asm__("x5") = a[5];
	__asm__ volatile("svc #0"
		: "+r"(x0)
		: "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5)
		: "memory");
	return x0;
}

__asm__(".globl _start\n_start:\n\tmov x29, #0\n\tbl start\n");
#else
#error "launch knows the system calls of x86_64 and aarch64 only"
#endif

enum {
	SOCKET = 3, LIFE = 4,
	PROT_READ_WRITE = 3, MAP_PRIVATE_ANONYMOUS = 0x22, MAP_FIXED_NOREPLACE = 0x100000,
	PR_SET_NAME = 15,
	ENOENT = 2, EINTR = 4, EACCES = 13, ENOTDIR = 20, EPIPE = 32, MAX_ERRNO = 4095,
	FAILED = 127,
};
/* as in attempt.go */
enum {
	KEEP = 1, FIRST_KEPT = 2, MAY_FAIL = 4, MAY_MISS = 8, FORKS = 16, IS_LAST = 32, SKIP_SHIFT = 8,
	NO_LIST = -1, HELPER = -2, PROCESS = -3,
};
static char *const BASE = (char *)0x10000000;

struct step { long number, args[6], flags; };
static struct { long size, calls, count; } list;

static long call3(long number, long a, long b, long c)
{
	long args[6] = { a, b, c, 0, 0, 0 };
	return call(number, args);
}

__attribute__((noreturn)) static void end(long code)
{
	for (;;)
		call3(EXIT_GROUP, code, 0, 0);
}

static void say(long what, long value)
{
	int words[2] = { (int)what, (int)value };
	call3(WRITE, SOCKET, (long)words, sizeof words);
}

__attribute__((noreturn)) static void fail(long which, long error)
{
	say(which, error);
	end(FAILED);
}

static void read_all(char *to, long n)
{
	while (n > 0) {
		long got = call3(READ, SOCKET, (long)to, n);
		if (got == -EINTR)
			continue;
		if (got <= 0)
			fail(NO_LIST, got ? -got : EPIPE); /* the supervisor is gone */
		to += got;
		n -= got;
	}
}

/*
 * The child goes on once the supervisor knows its pid and says so. The parent, which alone could reap the
 * child, lives until the supervisor kills it or ends.
 */
static void forked(long pid, long is_last)
{
	char byte;
	if (pid > 0) {
		say(is_last ? PROCESS : HELPER, pid);
		call3(CLOSE, SOCKET, 0, 0);
		call3(READ, LIFE, (long)&byte, 1);
		end(0);
	}
	if (is_last)
		call3(CLOSE, LIFE, 0, 0);
	read_all(&byte, 1);
}

__attribute__((noreturn, used)) void start(void)
{
	static const char name[] = "minicri-launch";
	long kept = 0;
	call3(PRCTL, PR_SET_NAME, (long)name, 0);
	read_all((char *)&list, sizeof list);
	long map[6] = { (long)BASE, list.size, PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0 };
	long result = call(MMAP, map);
	if (result != (long)BASE)
		fail(NO_LIST, -result);
	read_all(BASE, list.size);
	struct step *steps = (struct step *)(BASE + list.calls);
	for (long i = 0; i < list.count; i++) {
		struct step *s = &steps[i];
		if (s->flags & FIRST_KEPT)
			s->args[0] = kept;
		result = call(s->number, s->args);
		int failed = result < 0 && result >= -MAX_ERRNO;
		int missed = result == -ENOENT || result == -EACCES || result == -ENOTDIR;
		if (failed && !(s->flags & MAY_FAIL) && !(missed && s->flags & MAY_MISS))
			fail(i, -result);
		if (s->flags & FORKS && !failed)
			forked(result, s->flags & IS_LAST);
		if (s->flags & KEEP)
			kept = result;
		if (!failed)
			i += s->flags >> SKIP_SHIFT;
	}
	fail(list.count, 0); /* the last one does not return */
}
